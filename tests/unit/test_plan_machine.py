"""What was measured on a machine: tables between their points, the fit of an exchange, the file and its refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.rates import HERE, made_up, made_up_rates
from unisono.errors import ConfigError
from unisono.plan.hardware import GIB, of_name
from unisono.plan.here import host_memory, this_device
from unisono.plan.machine import (
    Table,
    cpu_multiplies_bf16,
    cpu_name,
    fit_exchange,
    machine_file,
    read_measured,
    write_measured,
)

SIZES = [2.0**power for power in (12, 16, 20, 22, 24)]


@settings(max_examples=50)
@given(power=st.floats(0, 2), scale=st.floats(1e-12, 1), sizes=st.tuples(st.floats(1, 1e6), st.floats(1, 1e6)))
def test_a_table_follows_any_power_of_its_sizes_within_and_beyond(
    power: float, scale: float, sizes: tuple[float, float]
) -> None:
    axes = ((16.0, 256.0, 4096.0), (8.0, 512.0))
    table = Table(axes, tuple(scale * (a * b) ** power for a in axes[0] for b in axes[1]))
    assert table.at(*sizes) == pytest.approx(scale * (sizes[0] * sizes[1]) ** power, rel=1e-6)
    assert table.at(sizes[0], 0) == 0


@settings(max_examples=50)
@given(alpha=st.floats(1e-6, 1e-2), beta=st.floats(1e-11, 1e-8))
def test_an_exchange_is_fitted_exactly_where_it_is_a_line(alpha: float, beta: float) -> None:
    fitted = fit_exchange(SIZES, [alpha + beta * size for size in SIZES])
    assert fitted == (pytest.approx(alpha, rel=1e-3), pytest.approx(beta, rel=1e-3))


@settings(max_examples=50)
@given(seconds=st.lists(st.floats(1e-6, 1), min_size=5, max_size=5))
def test_a_fit_of_anything_is_never_negative_and_no_worse_than_its_neighbours(seconds: list[float]) -> None:
    alpha, beta = fit_exchange(SIZES, seconds)
    assert alpha >= 0 and beta >= 0 and alpha + beta > 0

    def error(a: float, b: float) -> float:
        return sum(((a + b * x - y) / y) ** 2 for x, y in zip(SIZES, seconds))

    for factor in (0.9, 1.1):
        assert error(alpha, beta) <= min(error(alpha * factor, beta), error(alpha, beta * factor)) * (1 + 1e-9)


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "machine.json"
    assert read_measured(file, HERE) is None
    write_measured(made_up(1, 2), file)
    found = read_measured(file, HERE)
    assert found == made_up(1, 2)
    assert found.for_ranks(2) == made_up_rates(2) and found.for_ranks(4) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"host": "other"}, "host other, not host"),
        ({"torch": "2.8.0"}, "torch 2.8.0, not 2.13.0"),
        ({"device": "another CPU"}, "device another CPU, not a CPU"),
        ({"cores": 64}, "cores 64, not 2"),
    ],
)
def test_another_machine_is_refused_in_words(tmp_path: Path, change: dict[str, object], said: str) -> None:
    file = tmp_path / "machine.json"
    write_measured(replace(made_up(1), identity=replace(HERE, **change)), file)
    with pytest.raises(ConfigError, match=said) as refused:
        read_measured(file, HERE)
    assert "unisono plan --calibrate" in str(refused.value) and str(file) in str(refused.value)


def test_a_gpu_is_not_compared_by_name(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    write_measured(replace(made_up(1), identity=replace(HERE, device="a GPU"), on_gpu=True), file)
    assert read_measured(file, HERE) is not None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"version": 1', '"version": 0'),
        lambda text: text.replace('"seconds": [', '"seconds": [1, '),
        lambda text: json.dumps({**json.loads(text), "rates": [{"ranks": 1}]}),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: object) -> None:
    file = tmp_path / "machine.json"
    write_measured(made_up(1), file)
    file.write_text(damage(file.read_text()))  # type: ignore[operator]
    with pytest.raises(ConfigError, match=r"machine\.json"):
        read_measured(file, HERE)


def test_the_cache_is_where_xdg_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine_file() == tmp_path / "unisono/machine.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert machine_file() == Path.home() / ".cache/unisono/machine.json"


def test_a_cpu_is_named_and_asked_for_bf16(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(
        "model name\t: AMD EPYC\ncpu family\t: 26\nmodel\t\t: 2\nflags\t\t: avx2 avx512_bf16\n\nmodel : 3\n"
    )
    assert cpu_name(info) == "AMD EPYC (family 26, model 2)" and cpu_multiplies_bf16(info)
    info.write_text("flags : avx2 avx512f\n")
    assert not cpu_multiplies_bf16(info) and not cpu_multiplies_bf16(tmp_path / "none")


def test_bf16_is_told_as_torch_tells_it() -> None:
    import torch

    from unisono.precision import multiplies_bf16

    assert cpu_multiplies_bf16() == multiplies_bf16(torch.device("cpu"))


def test_the_memory_is_that_of_the_container(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text("1000000\n")
    assert host_memory(limit) == 1_000_000
    limit.write_text("max\n")
    assert host_memory(limit) == host_memory(tmp_path / "none") > 1_000_000


def test_this_machine_is_a_device_with_and_without_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from unisono.plan import here, machine

    monkeypatch.setattr(here, "_gpus", list)
    monkeypatch.setattr(machine, "this_machine", lambda: HERE)
    one, two = (this_device(ranks, tmp_path / "none") for ranks in (1, 2))
    assert one.rates is None and one.half_tflops == 0 and not one.is_gpu
    assert one.memory_bytes > 2 * two.memory_bytes > 0
    write_measured(made_up(1), tmp_path / "machine.json")
    known = this_device(1, tmp_path / "machine.json")
    assert known.rates == made_up_rates(1) and known.fp32_tflops == pytest.approx(0.02, rel=0.1)
    assert this_device(2, tmp_path / "machine.json").rates is None


@pytest.mark.parametrize(
    ("name", "gib", "known"),
    [
        ("NVIDIA GeForce RTX 3090", 23.6, "rtx-3090"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100-80"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40"),
        ("Tesla V100-SXM2-32GB", 31.7, "v100-32"),
        ("NVIDIA L4", 22.0, "l4"),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("NVIDIA H200", 139.8, "h200"),
    ],
)
def test_a_gpu_is_known_by_the_drivers_name_for_it(name: str, gib: float, known: str) -> None:
    device = of_name(name, int(gib * GIB))
    assert device.name == known and device.memory_gib == pytest.approx(gib)


@pytest.mark.parametrize(("name", "gib"), [("NVIDIA GeForce RTX 4090 Laptop GPU", 15.7), ("NVIDIA Titan Z", 6.0)])
def test_another_gpu_has_its_own_memory_and_a_speed_that_is_said_to_be_unknown(name: str, gib: float) -> None:
    device = of_name(name, int(gib * GIB))
    assert device.name == name and device.memory_gib == pytest.approx(gib) and "unknown" in device.source
