"""Moments of 8 bits: near AdamW in what they do, the same on any number of ranks, and back after a kill to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.ranks import run_ranks
from support.runs import assert_same_weights, make_run, numbers_of, train_until_killed, train_whole
from support.tiny import save_tiny
from support.updates import Settings, assert_same_step, assert_same_trace, train_updates
from unisono.config.schema import OptimSection

EIGHT = {"name": "adamw8bit", "lr": 1e-3, "schedule": "cosine", "warmup": 1, "max_grad_norm": 1.0}
RUN = Settings(optim=EIGHT, updates=6, global_size=3)


def test_bytes_are_those_that_are_kept() -> None:
    import torch

    from unisono.optim import build_optimizer, moment_bytes, optimizer_state

    named = [("big", torch.nn.Parameter(torch.randn(70, 130))), ("small", torch.nn.Parameter(torch.randn(40, 40)))]
    for name in ("adamw", "adamw8bit"):
        section = OptimSection(name=name)  # type: ignore[arg-type]
        optimizer = build_optimizer(section, named)
        for _, parameter in named:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        state = optimizer_state(optimizer, named)
        for owner, parameter in named:
            kept = [v for k, v in state.items() if k.startswith(owner) and not k.endswith(("/step", "qmap1", "qmap2"))]
            assert sum(each.nbytes for each in kept) == moment_bytes(section, parameter), (name, owner)


def test_it_goes_where_adamw_goes_on_any_number_of_ranks(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", hidden_size=64, intermediate_size=128)
    plain = replace(RUN, optim=EIGHT | {"name": "adamw"})
    eight, exact = run_ranks(train_updates, 1, model, RUN, plain)[0]
    assert eight.losses == pytest.approx(exact.losses, rel=0.02) and eight.losses != exact.losses
    moved = max(float(np.abs(eight.parameters[n] - exact.parameters[n]).max()) for n in exact.parameters)
    assert 0 < moved < 6e-3, "no more than the steps of six updates"
    for world in (2, 3):
        for traces in run_ranks(train_updates, world, model, RUN, replace(RUN, share_optimizer=True)):
            assert_same_trace(traces[0], eight, tolerance=1e-4)
            assert_same_step(traces[1], traces[0], tolerance=0.0)


def test_a_killed_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", hidden_size=64, intermediate_size=128)
    sections: dict[str, Any] = {"length": {"updates": 6}, "optim": EIGHT}
    whole = make_run(tmp_path, model, name="whole", **sections)
    killed = make_run(tmp_path, model, name="killed", **sections)
    shared = "strategy.share_optimizer=true"
    train_whole(2, whole)
    train_until_killed(2, killed, 5, shared)
    assert "resumed update-00000004" in train_whole(2, killed)
    assert_same_weights(tmp_path / "killed", tmp_path / "whole")
    assert numbers_of(tmp_path / "killed") == numbers_of(tmp_path / "whole")
