"""Number formats measured: a matrix product in bf16 and in fp16 against fp32, on the device that would train."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from unisono.doctor.finding import Finding

if TYPE_CHECKING:
    import torch

_SIDE = {"cpu": 512, "cuda": 4096}
_BUDGET_SECONDS = 0.3  # for each format
_TRIES = 10


def formats() -> Finding:
    """Time the product of a linear layer, square, in each format."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    seconds: dict[str, float] = {}
    missing: list[str] = []
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        try:
            seconds[name] = product_seconds(dtype, device)
        except RuntimeError as error:  # torch's word for "not on this device", and for a device that is full
            missing.append(f"{name} not supported ({str(error).splitlines()[0]})")
    if "fp32" not in seconds:
        return Finding("number formats", "fail", ", ".join(missing), "is the device full, or broken?")
    factors = {name: seconds["fp32"] / its for name, its in seconds.items() if name != "fp32"}
    parts = [f"{device.type}: fp32 {2 * _SIDE[device.type] ** 3 / seconds['fp32'] / 1e9:,.0f} GFLOP/s"]
    parts += [f"{name} {factor:.2f} x the speed of fp32" for name, factor in factors.items()]
    return verdict(device.type, ", ".join([*parts, *missing]), factors.get("bf16", 0.0))


def verdict(device: str, detail: str, bf16: float) -> Finding:
    """Judge ``bf16``, its speed in units of fp32's."""
    if bf16 >= 1:
        return Finding("number formats", "ok", detail)
    if device == "cuda":
        return Finding("number formats", "warn", detail, "this GPU is slow in bf16: try precision.compute: fp16")
    return Finding("number formats", "ok", detail, "bf16 costs time here: leave precision.compute at auto")


def product_flops(dtype: torch.dtype, device: torch.device) -> float:
    """Return the floating point operations a second of the product, a multiplication and an addition counted as two."""
    return 2 * _SIDE[device.type] ** 3 / product_seconds(dtype, device)


def product_seconds(dtype: torch.dtype, device: torch.device) -> float:
    """Time one product, the fastest of a few within a budget of time."""
    import torch

    side = _SIDE[device.type]
    a = torch.ones((side, side), dtype=dtype, device=device)
    b = torch.ones((side, side), dtype=dtype, device=device)
    best, begin = float("inf"), time.perf_counter()
    for attempt in range(_TRIES + 1):
        start = time.perf_counter()
        torch.nn.functional.linear(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        end = time.perf_counter()
        if attempt > 0:  # the first one sets things up
            best = min(best, end - start)
        if attempt > 0 and end - begin > _BUDGET_SECONDS:
            break
    return best
