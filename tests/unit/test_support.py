"""The test tools themselves: ranks run, fail and time out as they should."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from support.ranks import RankFailed, run_ranks


def _square(rank: int, world: int, value: int) -> int:
    assert int(os.environ.get("RANK", "0")) == rank
    return value * value + rank * world


def _fail_on_one(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("planted")
    time.sleep(30)


def _sleep(rank: int, world: int) -> None:
    time.sleep(30)


def test_ranks_return_in_order() -> None:
    assert run_ranks(_square, 2, 3) == [9, 11]


def test_a_failing_rank_is_named_at_once() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 raised[\s\S]*planted"):
        run_ranks(_fail_on_one, 2)


def test_a_hang_ends_at_the_limit() -> None:
    with pytest.raises(RankFailed, match="did not finish"):
        run_ranks(_sleep, 2, limit=1.0)


def test_byte_tokenizer_ids(tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert tokenizer("Aä\n", add_special_tokens=False)["input_ids"] == [65, 0xC3, 0xA4, 10]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257, 258)
    assert tokenizer.decode([65, 0xC3, 0xA4, 10]) == "Aä\n"
