"""Changing values in a run file's text: the new value is there, and every other line as it was."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from support.runfile import SOUND, write_run
from unisono.config.edit import put, put_all
from unisono.config.load import load

COMMENTED = """\
# my run
run: {output_dir: out, seed: 1}  # where
model:
  path: starter   # small
  lora:
    rank: 4
    # as in the paper
    alpha: 8

data: {train: [train.jsonl],}
batch:

  # samples
  global_size: 8
strategy:
length: {
  epochs: 1  # enough
}
"""


def test_values_change_in_their_place_and_the_rest_stays() -> None:
    text = put_all(
        COMMENTED,
        {
            "run.seed": 2,
            "model.lora.rank": 16,
            "model.lora.dropout": 0.5,
            "data.prefetch": 4,
            "batch.micro_tokens": 512,
            "strategy.bucket_mib": 100,
            "length.epochs": 3,
            "launch.env.NCCL_ALGO": "Ring",
            "launch.env.A": "1",
        },
    )
    assert (
        text
        == """\
# my run
run: {output_dir: out, seed: 2}  # where
model:
  path: starter   # small
  lora:
    dropout: 0.5
    rank: 16
    # as in the paper
    alpha: 8

data: {train: [train.jsonl],prefetch: 4}
batch:

  # samples
  micro_tokens: 512
  global_size: 8
strategy: {bucket_mib: 100}
length: {
  epochs: 3  # enough
}
launch: {env: {NCCL_ALGO: Ring, A: '1'}}
"""
    )


def test_whole_sections_are_replaced() -> None:
    text = put_all(COMMENTED, {"model.lora": {"rank": 2}, "batch": {"global_tokens": 64}})
    assert "  lora: {rank: 2}\n\ndata:" in text or "  lora: {rank: 2}\ndata:" in text
    assert "batch: {global_tokens: 64}\nstrategy:" in text
    assert put("", ("run", "seed"), 1) == "run: {seed: 1}\n"
    assert put("{}", ("run", "seed"), 1) == "{run: {seed: 1}}"
    assert yaml.safe_load(put("run:\n  name: |\n    a\n    b\n  seed: 1\n", ("run", "name"), "c")) == {
        "run": {"name": "c", "seed": 1}
    }


IN_JSON = json.dumps(
    {
        "run": {"output_dir": "out"},
        "model": {"path": "starter"},
        "data": {"train": ["train.jsonl"]},
        "batch": {"global_size": 8},
        "length": {"epochs": 1},
    },
    indent=1,
)
VALUES = {
    "run.seed": st.integers(0, 9),
    "run.name": st.sampled_from(["no", "2026", "a-b"]),
    "model.lora": st.none() | st.fixed_dictionaries({"rank": st.integers(1, 9)}),
    "batch.micro_tokens": st.just("auto") | st.integers(1, 9999),
    "strategy.bucket_mib": st.integers(1, 99),
    "strategy.share_optimizer": st.booleans(),
    "data.weights": st.dictionaries(st.sampled_from("ab"), st.floats(0.5, 2)),
    "launch.env.A": st.text(st.characters(codec="ascii", categories=["L", "N", "P", "Zs"])),
    "launch.env.B": st.sampled_from(["", "1", "on", "^LL128", "a: b", "#"]),
}


@settings(max_examples=60, deadline=None)
@given(
    changes=st.lists(st.sampled_from(sorted(VALUES)).flatmap(lambda key: st.tuples(st.just(key), VALUES[key]))),
    start=st.sampled_from([SOUND, COMMENTED, COMMENTED.rstrip(), IN_JSON]),
)
def test_reading_it_back_gives_what_overrides_give(
    changes: list[tuple[str, object]], start: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("edit")
    values = dict(changes)
    expected = load(write_run(folder, start), [f"{key}={json.dumps(value)}" for key, value in values.items()])
    assert load(write_run(folder, put_all(start, values), "edited.yaml")).config == expected.config
