"""This machine as a device to plan for: its GPUs as the driver names them, or its CPU, with what was measured here.

No torch: the driver's own program is asked for GPUs (NVIDIA's; others are planned for with ``--device``).
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import psutil

from unisono.plan.hardware import GIB, Device, of_name
from unisono.plan.machine import Measured, Rates, cpu_multiplies_bf16, cpu_name, machine_file, read_measured

PROCESS_BYTES = 400 * 2**20  # of a rank before its model: Python, torch and its libraries, as measured on Linux


def this_device(ranks: int, file: Path | None = None) -> Device:
    """Return what one of ``ranks`` ranks has on this machine. ConfigError for measurements that are of another one."""
    measured = read_measured(file or machine_file())
    gpus = _gpus()
    if not gpus:
        return _calibrated_cpu(ranks, measured)
    name, memory = min(gpus, key=lambda gpu: gpu[1])
    device = of_name(name, memory)
    return replace(device, rates=measured.for_ranks(ranks)) if measured is not None and measured.on_gpu else device


def _gpus() -> list[tuple[str, int]]:
    """Ask NVIDIA's driver for names and bytes."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if answer.returncode:
        return []  # a driver without a card
    lines = (line.rpartition(",") for line in answer.stdout.strip().splitlines())
    return [(name, int(mib) * 2**20) for name, _, mib in lines]


def _calibrated_cpu(ranks: int, measured: Measured | None) -> Device:
    plain = cpu(host_memory() // ranks - PROCESS_BYTES, has_bf16=cpu_multiplies_bf16())
    rates = None if measured is None or measured.on_gpu else measured.for_ranks(ranks)
    if rates is None:
        return plain
    half = _peak(rates, "bf16" if plain.has_bf16 else "fp32")
    return replace(plain, half_tflops=half, fp32_tflops=_peak(rates, "fp32"), source="measured here", rates=rates)


def cpu(memory_bytes: int, *, has_bf16: bool) -> Device:
    """Return a rank's part of this machine's CPU and memory; of its speed nothing is known."""
    return Device(
        name=f"this machine's {cpu_name()}",
        memory_gib=memory_bytes / GIB,
        half_tflops=0.0,
        fp32_tflops=0.0,
        memory_gb_per_second=0.0,
        link_gb_per_second=0.0,
        watts=0,
        source="not measured",
        has_bf16=has_bf16,
        is_gpu=False,
    )


def _peak(rates: Rates, compute: str) -> float:
    """Return the TFLOPS of the best product that was timed."""
    table = rates.tables[f"{compute} product forward"]
    tokens, inner, outer = (axis[-1] for axis in table.axes)
    return 2e-12 * tokens * inner * outer / table.at(tokens, inner, outer)


def host_memory(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Return the bytes of this host, or the limit of its container."""
    total = psutil.virtual_memory().total
    told = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    return total if told == "max" else min(total, int(told))
