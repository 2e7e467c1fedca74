"""Stepping within backward is the same step, to the bit, and no gradient outlives it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.ranks import run_ranks
from support.runs import assert_same_weights, make_run, numbers_of, train_until_killed, train_whole
from support.tiny import save_tiny
from support.updates import Settings, Trace, assert_same_step, assert_same_trace, train_updates

FREE = {"schedule": "cosine", "warmup": 1, "max_grad_norm": None, "lr": 1e-3}
OPTIMIZERS = {
    "adamw": {"name": "adamw", "weight_decay": 0.1},
    "sgd": {"name": "sgd", "momentum": 0.9, "lr": 0.05},
    "adamw8bit": {"name": "adamw8bit"},
    "adamw_bf16": {"name": "adamw_bf16"},
}
RUNS = [
    *(Settings(optim=FREE | own, updates=4, global_size=3) for own in OPTIMIZERS.values()),
    Settings(optim=FREE, updates=3, micro_tokens=24),
    Settings(optim=FREE, updates=3, micro_tokens=24, compute="bf16", checkpointing="full"),
    Settings(optim=FREE, updates=3, lora={"rank": 4, "alpha": 8.0}),
]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose moments have 8 bits where they are asked for."""
    return save_tiny(tmp_path_factory.mktemp("wide") / "model", hidden_size=256, intermediate_size=320)


def within(settings: Settings) -> Settings:
    return replace(settings, optim=settings.optim | {"in_backward": True})


def assert_same_bits(ours: Trace, theirs: Trace) -> None:
    assert_same_trace(ours, theirs, tolerance=0.0)
    assert_same_step(ours, theirs, tolerance=0.0)
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-5)
    assert ours.rates == theirs.rates


@pytest.mark.parametrize(
    ("world", "cut"),
    [
        (1, {}),
        (2, {"strategy": "fsdp2"}),
        (3, {"strategy": "fsdp2", "exchange": "micro_batch"}),
        (4, {"strategy": "fsdp2", "shard_ranks": 2}),
    ],
    ids=str,
)
def test_the_same_bits(wide: Path, world: int, cut: dict[str, Any]) -> None:
    """Every optimizer, accumulation, bf16 with blocks computed again, adapters."""
    runs = [replace(settings, **cut) for settings in (RUNS if world < 3 else RUNS[:1] + RUNS[3:6])]
    after, inside = (run_ranks(train_updates, world, wide, *each)[0] for each in (runs, map(within, runs)))
    for ours, theirs in zip(inside, after, strict=True):
        assert_same_bits(ours, theirs)


def test_a_tied_matrix_is_stepped_once(tiny_tied: Path) -> None:
    """Its gradient is whole when the head's and the embedding's part have come."""
    run = Settings(optim=FREE, updates=3, micro_tokens=24)
    after, inside = run_ranks(train_updates, 1, tiny_tied, run, within(run))[0]
    assert_same_bits(inside, after)


def _skip_in_the_last(training: Any, place: Any) -> None:
    """Leave the second block's MLP out of every second forward."""
    mlp, calls = training.causal_lm.model.layers[1].mlp, iter(range(1000))
    whole = mlp.forward
    mlp.forward = lambda hidden: whole(hidden) if next(calls) % 2 == 0 else hidden * 0


def test_what_the_last_micro_batch_leaves_out_is_stepped_too(tiny: Path) -> None:
    """Its gradient comes from the micro-batches before, and counts in the norm."""
    run = Settings(optim=FREE, updates=3, micro_size=4, global_size=8, prepare=_skip_in_the_last)
    after, inside = run_ranks(train_updates, 1, tiny, run, within(run))[0]
    assert_same_bits(inside, after)


def look_inside(rank: int, world: int, folder: Path, strategy_name: Any) -> tuple[int, bool, bool]:
    """Return the most gradients that lie there at a step, whether a try moved weights, and whether one left any."""
    import torch

    from unisono import dist
    from unisono.build import load_and_shard
    from unisono.config.schema import ModelSection, OptimSection, StrategySection
    from unisono.optim import build_optimizer
    from unisono.resume import trainable
    from unisono.strategy import choose

    place = dist.find_world()
    dist.join(place, 30)
    strategy = choose(StrategySection(name=strategy_name), world)
    section = ModelSection(path=str(folder))
    _, training, model = load_and_shard(section, folder, strategy, place, weights=torch.float32, seed=1)
    parameters = [parameter for _, parameter in trainable(training)]
    optimizer = build_optimizer(OptimSection(), trainable(training))
    counts: list[int] = []

    def step_alone(parameter: torch.nn.Parameter) -> None:
        counts.append(sum(each.grad is not None for each in parameters))

    strategy.bind(optimizer, step_alone)
    ids = torch.arange(8)
    batch = {
        "input_ids": ids[None],
        "position_ids": ids[None],
        "predictors": ids,
        "target_ids": ids,
        "document_lengths": [8],
    }
    for is_tried in (True, False):
        with strategy.microbatch(last=True, is_tried=is_tried):
            strategy.backward(model(**batch))
        if is_tried:
            tried = bool(counts)
    left = any(parameter.grad is not None for parameter in parameters)
    assert len(counts) == len(parameters)
    parameters.clear()
    del model, training, optimizer, strategy
    dist.leave()
    return max(counts), tried, left


@pytest.mark.parametrize(("world", "name", "most"), [(1, "single", 1), (2, "fsdp2", 12)])
def test_few_gradients_lie_there_at_a_time(tiny: Path, world: int, name: str, most: int) -> None:
    """One; sharded, those of a block, whose parts come together. A try steps nothing and leaves nothing."""
    for found, tried, left in run_ranks(look_inside, world, tiny, name):
        assert found <= most and not tried and not left


def test_a_killed_run_goes_on_to_the_bit_and_without_it(tiny: Path, tmp_path: Path) -> None:
    """Checkpoints hold what they hold without it: half of this run steps within backward, half of it after."""
    sections: dict[str, Any] = {"length": {"updates": 6}, "optim": {"lr": 1e-3, "max_grad_norm": None}}
    whole, killed = (make_run(tmp_path, tiny, name=each, **sections) for each in ("whole", "killed"))
    train_whole(1, whole)
    train_until_killed(1, killed, 5, "optim.in_backward=true")
    assert "resumed update-00000004" in train_whole(1, killed)
    assert_same_weights(tmp_path / "killed", tmp_path / "whole")
    ours, theirs = numbers_of(tmp_path / "killed"), numbers_of(tmp_path / "whole")
    assert [line["loss"] for line in ours] == [line["loss"] for line in theirs]
