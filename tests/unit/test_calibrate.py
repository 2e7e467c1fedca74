"""The measuring itself, with the smallest sizes there are: everything the planner asks for has been timed."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.sizes import LLAMA_2_7B
from unisono.bench.calibrate import Extent, calibrate
from unisono.errors import LaunchError
from unisono.plan.architecture import architecture_of
from unisono.plan.machine import read_measured
from unisono.plan.measured import seconds_measured
from unisono.plan.memory import Load

TINY = Extent(
    tokens=(4, 16),
    widths=(8, 16),
    lengths=(4, 8),
    heads=(8, 16),
    values=(2**11, 2**12),
    messages=(2**12, 2**14, 2**16),
    updates=2,
    budget_seconds=1e-6,
)


def test_two_ranks_are_timed_and_the_planner_has_its_seconds(tmp_path: Path) -> None:
    file, said = tmp_path / "machine.json", list[str]()
    measured = calibrate([2], said.append, extent=TINY, file=file)
    assert read_measured(file) == measured and said[-1] == f"calibrate: {file}"
    assert any("2 ranks at a time" in line for line in said)
    rates = measured.for_ranks(2)
    assert rates is not None and rates.threads >= 1 and rates.alpha_seconds + rates.seconds_per_byte > 0
    shape = architecture_of(LLAMA_2_7B, where="here")
    for lora in (None, 8):
        for is_half in {False, measured.has_bf16}:
            load = Load(shape, (64,), 64, is_half=is_half, lora_rank=lora, strategy="ddp", ranks=2)
            seconds = seconds_measured(load, rates, num_micro=1)
            assert seconds.products > 0 and seconds.attention > 0 and seconds.exchange > 0


def test_a_rank_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="rank 0 of the calibration failed"):
        calibrate([1], lambda _: None, extent=Extent(tokens=(-1,)), file=tmp_path / "machine.json")
    assert not (tmp_path / "machine.json").exists()
