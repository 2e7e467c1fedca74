"""Strategy and micro-batch left open: one answer for all ranks, before anything is loaded; runs go on under another."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.ranks import RankFailed, run_ranks
from support.runs import ids_of, make_run, run_training, train_until_killed, train_whole, updates_of, weights_of
from support.tiny import save_tiny
from unisono import settle
from unisono.config.load import load
from unisono.dist import World
from unisono.plan.architecture import read_architecture
from unisono.plan.fit import choices
from unisono.plan.here import cpu


def train_with(rank: int, world: int, run_file: Path, memory_bytes: int, overrides: tuple[str, ...]) -> str:
    """Train on a host of so much memory for all ranks; the last one believes that there is ten times as much."""
    settle.PROCESS_BYTES = 0
    settle.host_memory = lambda: memory_bytes * (10 if rank == world - 1 else 1)
    return run_training(rank, world, run_file, overrides)


def too_little_for_ddp(run_file: Path, base: Path) -> int:
    """Return the bytes of a host on which each of two ranks with ddp is one byte short; the longest sample has 68."""
    config = load(run_file, ["strategy.name=ddp", "data.max_length=68"]).config
    found = choices(config, read_architecture(base), cpu(2**40, has_bf16=False), 2)
    return 2 * min(each.peak.total for each in found if not each.load.checkpointing) - 2


def test_a_run_that_does_not_fit_goes_on_under_fsdp2_and_ends_with_the_same_model(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", vocabulary=2000)
    usual = make_run(tmp_path, base, name="usual")
    assert "auto:" not in train_whole(2, usual)
    run_file = make_run(tmp_path, base, name="run")
    train_until_killed(2, run_file, 4)
    said = run_ranks(train_with, 2, run_file, too_little_for_ddp(run_file, base), ())[0]
    assert "auto: ddp" in said and "does not fit (" in said and "; fsdp2, " in said, said
    assert "resumed update-00000002" in said and "strategy: name fsdp2" in said
    run = tmp_path / "run"
    assert ids_of(run) == ids_of(tmp_path / "usual") and len(updates_of(run)) == 6
    for name, tensor in weights_of(tmp_path / "usual").items():
        torch.testing.assert_close(torch.from_numpy(weights_of(run)[name]), torch.from_numpy(tensor), rtol=0, atol=2e-5)
    assert '"auto"' in json.dumps(load(run / "run.yaml").config.strategy.name)  # as the person wrote it


def test_a_run_that_fits_in_no_way_is_refused_on_all_ranks(tmp_path: Path) -> None:
    run_file = make_run(tmp_path, save_tiny(tmp_path / "base"))
    with pytest.raises(RankFailed, match="no way to run this fits"):
        run_ranks(train_with, 2, run_file, 2**16, ())
    assert not (tmp_path / "run/model").exists()
    everything = ("strategy.name=ddp", "batch.micro_tokens=64")
    assert "warning: the plan is" in run_ranks(train_with, 2, run_file, 2**16, everything)[0]


def test_what_the_planner_does_not_know_is_told_and_left_as_it_is(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base")
    loaded = load(make_run(tmp_path, base))
    (base / "config.json").write_text(json.dumps({"model_type": "gpt_bigcode"}))
    world = World(0, 1, 0, 1, torch.device("cpu"))
    inputs: Any = SimpleNamespace(folder=base, data=SimpleNamespace(train=SimpleNamespace(longest=80)))
    said = list[str]()
    decision = settle.settle(loaded, inputs, world, "fp32", said.append)
    assert decision.values == {} and decision.applied(loaded.config) == loaded.config
    assert said == [decision.line] and "no formulas for the architecture 'gpt_bigcode'" in said[0]
