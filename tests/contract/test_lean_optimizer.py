"""Moments of 8 or 16 bits: near AdamW in what they do, the same on any ranks, and back after a kill to the bit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.ranks import run_ranks
from support.runs import assert_same_weights, make_run, numbers_of, train_until_killed, train_whole, updates_of
from support.tiny import save_tiny
from support.updates import Settings, Trace, assert_same_step, assert_same_trace, train_updates
from unisono.config.schema import OptimSection

NAMES = ("adamw8bit", "adamw_bf16")
LORA = {"rank": 4, "alpha": 8.0}


def settings_of(name: str) -> Settings:
    """Six updates of ``name``."""
    optim = {"name": name, "lr": 1e-3, "schedule": "cosine", "warmup": 1, "max_grad_norm": 1.0, "weight_decay": 0.1}
    return Settings(optim=optim, updates=6, global_size=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of whole blocks (256), and some of none (the MLP's 320)."""
    return save_tiny(tmp_path_factory.mktemp("wide") / "model", hidden_size=256, intermediate_size=320)


@cache
def alone(model: Path) -> dict[str, Trace]:
    """Each optimizer on one rank, and AdamW itself."""
    names = ("adamw", *NAMES)
    return dict(zip(names, run_ranks(train_updates, 1, model, *map(settings_of, names))[0], strict=True))


@pytest.mark.parametrize("name", ["adamw", *NAMES])
def test_bytes_are_those_that_are_kept(name: Any) -> None:
    import torch

    from unisono.optim import build_optimizer, moment_bytes, optimizer_state

    shapes = {"blocks": (70, 512), "ragged": (70, 130), "small": (4, 256), "vector": (5000,), "experts": (3, 8, 256)}
    named = [(key, torch.nn.Parameter(torch.randn(shape))) for key, shape in shapes.items()]
    section = OptimSection(name=name)
    optimizer = build_optimizer(section, named)
    for _, parameter in named:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer_state(optimizer, named)
    for owner, parameter in named:
        kept = [value for key, value in state.items() if key.startswith(owner) and not key.endswith("/step")]
        assert sum(each.nbytes for each in kept) == moment_bytes(section, parameter), (name, owner)
    assert moment_bytes(OptimSection(name="adamw8bit"), named[0][1]) == 2 * (70 * 512 + 4 * 70 * 2)
    assert moment_bytes(OptimSection(name="adamw_bf16"), named[1][1]) == 4 * 70 * 130


@pytest.mark.parametrize("name", NAMES)
def test_it_goes_where_adamw_goes(model: Path, name: str) -> None:
    lean, exact = alone(model)[name], alone(model)["adamw"]
    assert lean.losses == pytest.approx(exact.losses, rel=0.02) and lean.losses != exact.losses
    moved = max(float(np.abs(lean.parameters[n] - exact.parameters[n]).max()) for n in exact.parameters)
    assert 0 < moved < 6e-3, "no more than the steps of six updates"


def test_where_rows_are_no_blocks_it_is_adamw(tiny: Path) -> None:
    """Nothing of the small model has 8 bits: this is torch's AdamW with our hands."""
    ours, theirs = run_ranks(train_updates, 1, tiny, settings_of("adamw8bit"), settings_of("adamw"))[0]
    assert_same_step(ours, theirs, tolerance=1e-7)


@pytest.mark.parametrize("world", [2, 3])
def test_any_number_of_ranks_and_any_strategy(model: Path, world: int) -> None:
    """The second update sees the moments of the first: gradients differ in their order of sums only, bits seldom."""
    cuts = {"ddp": {}, "shared": {"share_optimizer": True}, "fsdp2": {"strategy": "fsdp2"}}
    runs = [replace(settings_of(name), **cut) for name in NAMES for cut in cuts.values()]
    traces = run_ranks(train_updates, world, model, *runs)[0]
    for place, name in enumerate(NAMES):
        replicas, shared, sharded = traces[3 * place : 3 * place + 3]
        assert_same_trace(replicas, alone(model)[name], tolerance=1e-4)
        assert_same_step(shared, replicas, tolerance=0.0)
        assert_same_trace(sharded, replicas, tolerance=1e-4)


def step_on_a_part(rank: int, world: int, name: str) -> list[np.ndarray]:
    """Take four steps on a parameter that is cut over the ranks; returns the whole of it, and of its moments."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from unisono import dist
    from unisono.optim import build_optimizer

    place = dist.find_world()
    dist.join(place, 30)
    generator = torch.Generator().manual_seed(1)
    whole, *gradients = (torch.randn(50, 512, generator=generator) for _ in range(5))
    mesh = init_device_mesh("cpu", (world,)) if world > 1 else None
    cut = (lambda each: distribute_tensor(each, mesh, [Shard(0)])) if mesh else (lambda each: each)
    parameter = torch.nn.Parameter(cut(whole))
    optimizer = build_optimizer(OptimSection(name=name, lr=0.01), [("it", parameter)], seed=7)  # type: ignore[arg-type]
    for gradient in gradients:
        parameter.grad = cut(gradient)
        optimizer.step()
    state = [each for key, each in optimizer.state[parameter].items() if key != "step"]
    answer = [(each.full_tensor() if mesh else each).float().detach().numpy() for each in (parameter, *state)]
    dist.leave()
    return answer


@pytest.mark.parametrize("name", NAMES)
def test_a_part_is_stepped_to_the_very_bits_of_the_whole(name: str) -> None:
    """Four ranks have 13, 13, 13 and 11 rows: neither blocks nor what is drawn at random know of the cut."""
    expected = run_ranks(step_on_a_part, 1, name)[0]
    for theirs in run_ranks(step_on_a_part, 4, name):
        assert len(theirs) == len(expected) == {"adamw8bit": 5, "adamw_bf16": 3}[name]
        for ours, whole in zip(theirs, expected, strict=True):
            np.testing.assert_array_equal(ours, whole)


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_run_goes_on_to_the_bit_and_elsewhere(model: Path, tmp_path: Path, name: str) -> None:
    """On the same strategy to the bit, though half of it with the optimizer shared out; sharded after that, near it."""
    sections: dict[str, Any] = {"length": {"updates": 6}, "optim": settings_of(name).optim}
    whole, killed, moved = (make_run(tmp_path, model, name=each, **sections) for each in ("whole", "killed", "moved"))
    train_whole(2, whole)
    train_until_killed(2, killed, 5, "strategy.share_optimizer=true")
    assert "resumed update-00000004" in train_whole(2, killed)
    assert_same_weights(tmp_path / "killed", tmp_path / "whole")
    assert numbers_of(tmp_path / "killed") == numbers_of(tmp_path / "whole")
    train_until_killed(3, moved, 5, "strategy.name=fsdp2")
    assert "resumed update-00000004" in train_whole(2, moved)
    losses = [[line["loss"] for line in updates_of(tmp_path / run)] for run in ("moved", "whole")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_adapters(model: Path) -> None:
    runs = [replace(settings_of(name), lora=LORA, updates=3) for name in NAMES]
    expected = run_ranks(train_updates, 1, model, *runs)[0]
    sharded = [replace(run, strategy="fsdp2") for run in runs]
    for ours, theirs in zip(run_ranks(train_updates, 2, model, *sharded)[0], expected, strict=True):
        assert_same_trace(ours, theirs, tolerance=1e-4)


@settings(max_examples=30, deadline=None)
@given(
    st.floats(-1e4, 1e4, width=32).filter(lambda value: abs(value) > 1e-30),
    st.integers(0, 2**31),
    st.integers(0, 2**40),
)
def test_rounding_at_random_keeps_the_mean(value: float, key: int, first: int) -> None:
    import torch

    from unisono.optim.lean import draw, round_at_random

    count = 20_000
    drawn = draw(key, first, count, torch.device("cpu"))
    rounded = round_at_random(torch.full((count,), value), drawn & 0xFFFF).double()
    gap = abs(value) * 2**-7
    assert float((rounded - value).abs().max()) <= gap, "to one of its two neighbours"
    assert abs(float(rounded.mean()) - value) <= gap * 5 / (2 * count**0.5), (
        "five sigma of a coin that is thrown so often"
    )


@given(st.integers(0, 2**31), st.integers(0, 2**40), st.integers(1, 50))
def test_what_is_drawn_follows_from_the_place(key: int, first: int, skipped: int) -> None:
    import torch

    from unisono.optim.lean import draw

    device = torch.device("cpu")
    whole = draw(key, first, 100, device)
    assert torch.equal(draw(key, first + skipped, 100 - skipped, device), whole[skipped:])
    assert len(set(whole.tolist())) >= 99, "a coincidence of 32 bits is rare"
