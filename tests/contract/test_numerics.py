"""Field cases about the numbers of an update: divisors, rates, clipping, loss scale, bad losses, dropout."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.ranks import run_ranks
from support.updates import Settings, Trace, assert_same_step, assert_same_trace, train_updates

FOUR = [(3, 1), (3, 2), (3, 4), (3, 9)]


def one_process(folder: Path, *runs: Settings) -> list[Trace]:
    return run_ranks(train_updates, 1, folder, *runs)[0]


def test_b01_accumulation_is_not_a_mean_of_means(tiny: Path) -> None:
    base = Settings(shapes=FOUR, global_size=4)
    whole, halves, singles = one_process(tiny, *(replace(base, micro_size=n) for n in (4, 2, 1)))
    for trace in (halves, singles):
        assert_same_step(trace, whole)
        assert trace.losses == pytest.approx(whole.losses, abs=1e-6)


def test_b01_a_sample_without_prompt_has_one_target_less_than_tokens(tiny: Path) -> None:
    base = Settings(shapes=[*FOUR, (0, 8)], global_size=5)
    whole, singles = one_process(tiny, replace(base, micro_size=5), replace(base, micro_size=1))
    assert_same_step(singles, whole)
    alone = one_process(tiny, Settings(shapes=[(0, 8)], global_size=1), Settings(shapes=[(1, 7)], global_size=1))
    assert alone[0].losses == alone[1].losses  # position 0 is never predicted


@pytest.mark.parametrize("shapes", [[(3, 1), (3, 15)], [(9, 0), (3, 15)]], ids=["1 and 15", "0 and 15"])
def test_b02_ranks_with_unequal_target_counts(tiny: Path, shapes: list[tuple[int, int]]) -> None:
    settings = Settings(shapes=shapes, global_size=2)
    (expected,) = one_process(tiny, settings)
    for (trace,) in run_ranks(train_updates, 2, tiny, settings):
        assert_same_step(trace, expected)
        assert trace.losses == pytest.approx(expected.losses, abs=1e-6)
        assert np.isfinite(trace.losses).all()


def test_b06_the_rate_depends_on_the_update_alone(tiny: Path) -> None:
    optim = {"name": "sgd", "lr": 1.0, "schedule": "linear", "warmup": 0, "max_grad_norm": None}
    base = Settings(shapes=FOUR * 2, updates=8, global_size=4, optim=optim)
    expected = [1 - k / 8 for k in range(8)]
    traces = one_process(tiny, base, replace(base, micro_size=1))
    traces += [trace for (trace,) in run_ranks(train_updates, 2, tiny, replace(base, micro_size=1))]
    assert [trace.rates for trace in traces] == [expected] * 4


def test_b07_the_global_batch_is_the_same_on_any_number_of_ranks(tiny: Path) -> None:
    settings = Settings(updates=3, global_size=8, micro_size=2)
    (expected,) = one_process(tiny, settings)
    for (trace,) in run_ranks(train_updates, 2, tiny, settings):
        assert_same_step(trace, expected)


def _scaled_step(max_norm: float | None, compute: str, scale: float = 65536.0) -> tuple[float, torch.Tensor]:
    """One SGD update of a weight whose true gradient has norm 0.5, through Precision and a strategy's clip."""
    from unisono.precision import Precision
    from unisono.strategy.single.apply import Single

    weight = torch.nn.Parameter(torch.zeros(4))
    module = torch.nn.Module()
    module.weight = weight
    strategy, precision = Single(), Precision(compute, torch.device("cpu"))
    strategy.shard(module)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    strategy.backward(precision.scale((weight * torch.full((4,), 0.25)).sum()))
    precision.unscale(optimizer)
    norm = strategy.clip(max_norm)
    precision.step(optimizer)
    return norm, weight.detach().clone()


def test_b08_clipping_comes_after_unscaling() -> None:
    plain, scaled = (_scaled_step(1.0, compute) for compute in ("fp32", "fp16"))
    assert scaled[0] == plain[0] == 0.5
    assert torch.equal(scaled[1], plain[1])  # a power of two scales exactly
    norm, weight = _scaled_step(0.1, "fp16")
    assert norm == 0.5
    assert float(weight.norm()) == pytest.approx(0.1 * 0.1, rel=1e-5)


def _overflow_at_update_three(training: torch.nn.Module, world: Any) -> None:
    """Plant an infinity into the gradient of micro-batch 2 of update 3."""
    calls = iter(range(1, 1000))

    def plant(grad: torch.Tensor) -> torch.Tensor:
        return grad * float("inf") if next(calls) == 2 * 4 + 2 else grad

    dict(training.named_parameters())["causal_lm.model.norm.weight"].register_hook(plant)


def _fp16(rank: int, world: int, folder: Path, settings: Settings) -> dict[str, Any]:
    """Six updates with the fp16 loss scale (fp32 products: CPU), noting the scale after each."""
    from unisono import precision

    scales = []

    def noting(method: Any) -> Any:
        def noted(self: precision.Precision, optimizer: torch.optim.Optimizer) -> None:
            method(self, optimizer)
            scales.append(self.state()["scale"])

        return noted

    precision.Precision.step = noting(precision.Precision.step)  # type: ignore[method-assign]
    precision.Precision.skip = noting(precision.Precision.skip)  # type: ignore[method-assign]
    precision.Precision.autocast = lambda self: nullcontext()  # type: ignore[method-assign]
    (trace,) = train_updates(rank, world, folder, settings)
    return {"trace": trace, "scales": scales}


@pytest.mark.parametrize("world", [1, 2])
def test_b09_an_overflow_skips_one_update_on_all_ranks(tiny: Path, world: int) -> None:
    settings = Settings(
        shapes=[(3, 4)] * (4 * world),
        global_size=4 * world,
        updates=6,
        micro_size=1,
        compute="fp16",
        prepare=_overflow_at_update_three,
    )
    for answer in run_ranks(_fp16, world, tiny, settings):
        assert answer["scales"] == [65536.0] * 2 + [32768.0] * 4
        assert answer["trace"].stepped == [True, True, False, True, True, True]


def test_b09_scale_and_growth_counter_survive_a_checkpoint() -> None:
    from unisono.precision import Precision

    saved = Precision("fp16", torch.device("cpu"))
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for factor, end in ((1.0, saved.step), (float("inf"), saved.skip), (1.0, saved.step), (1.0, saved.step)):
        saved.scale((weight * factor).sum()).backward()
        saved.unscale(optimizer)
        end(optimizer)
        optimizer.zero_grad()
    resumed = Precision("fp16", torch.device("cpu"))
    resumed.restore(saved.state())
    assert resumed.state() == saved.state()
    assert resumed.state()["scale"] == 32768.0
    assert resumed.state()["_growth_tracker"] == 2


class _BadLoss:
    """Makes the loss of one rank NaN in the given updates."""

    def __init__(self, bad_rank: int, updates: set[int]) -> None:
        self.bad_rank = bad_rank
        self.updates = updates

    def __call__(self, training: torch.nn.Module, world: Any) -> None:
        count = iter(range(1, 1000))

        def plant(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            return output * float("nan") if next(count) in self.updates and world.rank == self.bad_rank else output

        training.register_forward_hook(plant)


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_b10_a_bad_loss_on_one_rank_is_skipped_by_all(tiny: Path, bad_rank: int) -> None:
    settings = Settings(updates=4, prepare=_BadLoss(bad_rank, {3}))
    first, second = (trace for (trace,) in run_ranks(train_updates, 2, tiny, settings))
    for trace in (first, second):
        assert trace.stepped == [True, True, False, True]
        assert trace.bad_ranks == [[], [], [bad_rank], []]
        assert all(np.isfinite(value).all() for value in trace.parameters.values())
    assert all(np.array_equal(first.parameters[k], second.parameters[k]) for k in first.parameters)


def test_b11_small_updates_are_not_lost() -> None:
    from unisono.config.schema import OptimSection, PrecisionSection
    from unisono.optim import build_optimizer
    from unisono.precision import DTYPES

    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16).to(DTYPES[PrecisionSection().weights]))
    optimizer = build_optimizer(OptimSection(name="sgd", lr=1e-3), [("weight", weight)])
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert float(weight.detach()) == pytest.approx(0.9, abs=1e-5)
    assert float(weight.detach().bfloat16()) == 0.8984375


def _dropout_masks(rank: int, world: int) -> list[list[float]]:
    from unisono.state import seed_update

    masks = []
    for update in (1, 2, 1):
        seed_update(7, update, rank)
        masks.append(torch.nn.functional.dropout(torch.ones(64), 0.5).tolist())
    return masks


def test_b17_dropout_differs_between_ranks_and_repeats() -> None:
    first, second = run_ranks(_dropout_masks, 2)
    assert first[0] != second[0]
    assert first[0] != first[1]
    assert first[0] == first[2] and second[0] == second[2]


def _without_a_branch_on_rank_one(training: torch.nn.Module, world: Any) -> None:
    """At the second forward, rank 1 goes round the last block's gated unit."""
    count = iter(range(1, 1000))

    def skip(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(output) if next(count) == 2 and world.rank == 1 else output

    training.causal_lm.model.layers[1].mlp.register_forward_hook(skip)  # type: ignore[union-attr, index]


def test_b44_a_parameter_unused_on_one_rank_is_named(tiny: Path) -> None:
    from support.ranks import RankFailed

    settings = Settings(updates=3, prepare=_without_a_branch_on_rank_one)
    with pytest.raises(RankFailed, match=r"rank 1 raised[\s\S]*layers\.1\.mlp[\s\S]*unused_parameters=zero"):
        run_ranks(train_updates, 2, tiny, settings)


def test_b44_or_counts_as_zero_when_that_is_allowed(tiny: Path) -> None:
    settings = Settings(updates=3, prepare=_without_a_branch_on_rank_one, unused="zero")
    first, second = (trace for (trace,) in run_ranks(train_updates, 2, tiny, settings))
    assert all(np.array_equal(first.parameters[k], second.parameters[k]) for k in first.parameters)


def test_b44_lora_with_and_without_activation_checkpointing(tiny: Path) -> None:
    base = Settings(updates=3, lora={"rank": 4, "alpha": 8.0})
    for plain, recomputed in run_ranks(train_updates, 2, tiny, base, replace(base, checkpointing="full")):
        assert_same_trace(plain, recomputed)


def test_b75_bf16_autocast_on_a_cpu_is_close_to_fp32(tiny: Path) -> None:
    plain, half = one_process(tiny, Settings(), Settings(compute="bf16"))
    assert half.losses[0] == pytest.approx(plain.losses[0], rel=0.02)
    assert half.losses[0] != plain.losses[0]


def test_b75_fp16_on_a_cpu_is_refused() -> None:
    from unisono.errors import ConfigError
    from unisono.precision import choose

    with pytest.raises(ConfigError, match=r"precision.compute[\s\S]*auto"):
        choose("fp16", torch.device("cpu"))
