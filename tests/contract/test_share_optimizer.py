"""An optimizer that is shared out takes the same steps, bit for bit, and each rank keeps its share alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.ranks import run_ranks
from support.runs import assert_same_weights, make_run, numbers_of, train_until_killed, train_whole
from support.updates import Settings, assert_same_step, assert_same_trace, train_updates

ADAMW = {"name": "adamw", "lr": 1e-3, "schedule": "cosine", "warmup": 1, "max_grad_norm": 1.0}
MOMENTUM = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "schedule": "constant", "warmup": 0, "max_grad_norm": 0.5}
RUNS = [
    Settings(optim=ADAMW, updates=4, global_size=3),
    Settings(optim=MOMENTUM, updates=3, global_size=3, micro_tokens=24),
    Settings(optim=ADAMW, updates=3, lora={"rank": 4, "alpha": 8.0}),
]


@pytest.mark.parametrize("world", [2, 3])
def test_it_takes_the_same_steps(tiny: Path, world: int) -> None:
    shared = [replace(settings, share_optimizer=True) for settings in RUNS]
    whole = run_ranks(train_updates, world, tiny, *RUNS)[0]
    for traces in run_ranks(train_updates, world, tiny, *shared):
        for ours, theirs in zip(traces, whole, strict=True):
            assert_same_trace(ours, theirs, tolerance=0.0)
            assert_same_step(ours, theirs, tolerance=0.0)
            assert ours.norms == theirs.norms


@given(sizes=st.lists(st.integers(1, 500), min_size=1, max_size=30), ranks=st.integers(1, 5))
def test_the_shares_are_fair(sizes: list[int], ranks: int) -> None:
    from unisono.dist import deal

    owners = deal(sizes, ranks)
    assert len(owners) == len(sizes) and set(owners) <= set(range(ranks))
    loads = [sum(size for size, owner in zip(sizes, owners) if owner == rank) for rank in range(ranks)]
    assert max(loads) - min(loads) <= max(sizes)


def count_moments(rank: int, world: int, folder: Path) -> int:
    """Train two updates as a run does; returns the bytes of the moments on this rank."""
    import torch

    from unisono import dist
    from unisono.config.schema import ModelSection, OptimSection, StrategySection
    from unisono.loss import TrainingModel
    from unisono.model.load import load_model
    from unisono.optim import build_optimizer, optimizer_state
    from unisono.resume import trainable
    from unisono.strategy import choose

    place = dist.find_world()
    dist.join(place, 30)
    strategy = choose(StrategySection(share_optimizer=True), world)
    saved = load_model(ModelSection(path=str(folder)), folder, weights=torch.float32, seed=1)
    model = strategy.shard(TrainingModel(saved, document_attention=True))
    named = trainable(model)
    optimizer = build_optimizer(OptimSection(), named)
    strategy.bind(optimizer)
    for _, parameter in named:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer_state(optimizer, named)
    total = sum(each.nbytes for name, each in state.items() if not name.endswith("/step"))
    everything = sum(parameter.nbytes for _, parameter in named)
    del model, optimizer, named, state, strategy, saved
    dist.leave()
    return total * 1000 // everything


def test_each_rank_keeps_its_share_of_the_moments(tiny: Path) -> None:
    """Of two moments as large as the weights, half on each of two ranks."""
    shares = run_ranks(count_moments, 2, tiny)
    assert sum(shares) == pytest.approx(2000, abs=2) and max(shares) < 1250, shares


def test_a_run_goes_on_elsewhere_with_what_the_ranks_have_saved(tiny: Path, tmp_path: Path) -> None:
    """Killed while shared out over two ranks, on over three, then whole on two: the run that nobody disturbed."""
    sections: dict[str, Any] = {"length": {"updates": 8}, "optim": ADAMW, "batch": {"global_size": 6}}
    plain = make_run(tmp_path, tiny, name="plain", **sections)
    moved = make_run(tmp_path, tiny, name="moved", **sections)
    again = make_run(tmp_path, tiny, name="again", **sections)
    train_whole(2, plain)
    train_until_killed(2, again, 5, "strategy.share_optimizer=true")
    assert "resumed update-00000004" in train_whole(2, again, "strategy.share_optimizer=true")
    assert_same_weights(tmp_path / "again", tmp_path / "plain")
    train_until_killed(2, moved, 3, "strategy.share_optimizer=true")
    train_until_killed(3, moved, 5, "strategy.share_optimizer=true")
    assert "resumed update-00000004" in train_whole(2, moved)
    for ours, theirs in zip(numbers_of(tmp_path / "moved"), numbers_of(tmp_path / "plain"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
