"""The learning rate as a function of the update, and the groups of the optimizer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.config.schema import OptimSection
from unisono.optim import build_optimizer, peak_rate, rate


def rates(total: int, **settings: Any) -> list[float]:
    section = OptimSection(**({"warmup": 0} | settings))
    return [rate(section, update, total, 1.0) for update in range(1, total + 1)]


def test_linear_without_warmup_falls_from_one_by_equal_steps() -> None:
    assert rates(8, schedule="linear") == [1 - k / 8 for k in range(8)]


def test_warmup_reaches_the_peak_at_its_last_update() -> None:
    assert rates(6, schedule="constant", warmup=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_is_the_textbook_curve_after_warmup() -> None:
    expected = [0.5, 1.0] + [0.5 * (1 + math.cos(math.pi * k / 8)) for k in range(8)]
    assert rates(10, schedule="cosine", warmup=0.2) == pytest.approx(expected, abs=1e-15)


@given(
    st.integers(1, 500),
    st.sampled_from(["constant", "linear", "cosine"]),
    st.one_of(st.integers(0, 600), st.floats(0, 0.99)),
)
def test_a_rate_is_positive_and_never_above_the_peak(total: int, schedule: str, warmup: float) -> None:
    values = rates(total, schedule=schedule, warmup=warmup)
    assert all(0 < value <= 1 for value in values)


def test_the_rate_is_scaled_only_on_request() -> None:
    base = {"lr": 0.1, "lr_reference_batch": 16}
    assert peak_rate(OptimSection(lr=0.1), 64) == 0.1
    assert peak_rate(OptimSection(**base, lr_scaling="linear"), 64) == pytest.approx(0.4)
    assert peak_rate(OptimSection(**base, lr_scaling="sqrt"), 64) == pytest.approx(0.2)


def test_vectors_are_not_decayed_and_frozen_parameters_stay_out() -> None:
    matrix, norm, frozen = (torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,), (3, 3)))
    frozen.requires_grad_(False)
    named = [("matrix", matrix), ("norm", norm), ("frozen", frozen)]
    groups = build_optimizer(OptimSection(weight_decay=0.1), named).param_groups
    assert [(len(g["params"]), g["weight_decay"]) for g in groups] == [(1, 0.1), (1, 0.0)]
