"""The planner's collectives are those of real updates: same kinds, bytes, groups and order, on 64 and 1,024 ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.fake_group import Case, take_updates
from support.ranks import run_ranks
from support.tiny import save_tiny
from unisono.outcome import Word
from unisono.plan.architecture import read_architecture
from unisono.plan.exchange import NUM_WORDS, collectives
from unisono.plan.memory import Load

# matrices of more than a bucket's MiB and of less; rows that divide by no number of ranks here, and fewer than ranks
WIDE = {"hidden_size": 160, "intermediate_size": 600, "num_hidden_layers": 3, "num_attention_heads": 5}
CASES = [
    Case("ddp", 64, num_micro=2),
    Case("ddp", 1024, compute="bf16"),
    Case("ddp", 64, lora=4, share_optimizer=True),
    Case("ddp", 64, compute="bf16", weights="bf16"),
    Case("fsdp2", 64, num_micro=2),
    Case("fsdp2", 1024),
    Case("fsdp2", 64, compute="bf16", num_micro=3, exchange="micro_batch"),
    Case("fsdp2", 1024, compute="bf16", checkpointing=True),
    Case("fsdp2", 64, compute="bf16", weights="bf16"),
    Case("fsdp2", 64, compute="bf16", num_micro=2, keeps_gathered=True),
    Case("fsdp2", 64, compute="bf16", lora=4, num_micro=2),
    Case("fsdp2", 64, shard_ranks=8, num_micro=2),
    Case("fsdp2", 1024, compute="bf16", shard_ranks=8),
    Case("fsdp2", 1024, lora=4, shard_ranks=16),
]


def planned(case: Case, folder: Path) -> list[tuple[str, int, int]]:
    """What the planner says of a case."""
    load = Load(
        read_architecture(folder),
        (16,),
        10,
        is_half=case.compute == "bf16",
        has_half_weights=case.weights == "bf16",
        lora_rank=case.lora,
        recompute="full" if case.checkpointing else "none",
        strategy=case.strategy,
        ranks=case.ranks,
        share_optimizer=case.share_optimizer,
        exchanges_always=case.exchange == "micro_batch",
        shard_ranks=case.shard_ranks,
        keeps_gathered=case.keeps_gathered,
    )
    found = collectives(load, num_micro=case.num_micro, bucket_mib=case.bucket_mib)
    return [(each.kind, each.num_bytes, each.ranks(load)) for each in found]


@pytest.mark.parametrize("tied", [False, True])
def test_updates_send_what_the_planner_says(tmp_path: Path, tied: bool) -> None:
    shape: dict[str, Any] = {**WIDE, "vocabulary": 3001}
    folder = save_tiny(tmp_path / "model", tied=tied, **shape)
    cases = CASES[::4] if tied else CASES
    (seen,) = run_ranks(take_updates, 1, folder, *cases)
    for case, real in zip(cases, seen, strict=True):
        sent = planned(case, folder)
        if case.share_optimizer:  # a broadcast each: which comes first is no matter
            real, sent = sorted(real), sorted(sent)
        assert real == sent, f"{case}: {json.dumps(real)}"
    assert len({len(real) for real in seen}) > 1


def test_losses_travel_with_as_many_words_as_are_planned() -> None:
    assert 1 + len(Word().values()) == NUM_WORDS
