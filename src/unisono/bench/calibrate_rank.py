"""One rank of the calibration: ``python -m unisono.bench.calibrate_rank EXTENT``, under the environment of a rank.

All ranks time the same operation at the same time, since they share memory and caches in training too. Rank 0 prints a
line of JSON for each table, and one for the exchange.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as torch_dist

from unisono import dist
from unisono.bench.calibrate import Extent, Line
from unisono.bench.pieces import HEADS, Act, Workbench
from unisono.plan.machine import Table
from unisono.precision import multiplies_bf16
from unisono.worker import leave

LEAST, MOST = 3, 200  # repetitions


def main(extent: Extent) -> None:
    """Time everything."""
    world = dist.find_world()
    dist.join(world, 120)
    _say(world, Line("facts", _facts(world)))
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        if name == "fp32" or multiplies_bf16(world.device):
            _time_format(name, Workbench(world.device, dtype), extent, world)
    if world.size > 1:
        _say(world, Line("exchange", [[size, _exchange(size, extent, world)] for size in extent.messages]))
    dist.leave()


def _facts(world: dist.World) -> dict[str, Any]:
    facts: dict[str, Any] = {"threads": torch.get_num_threads(), "has_bf16": multiplies_bf16(world.device)}
    if world.device.type == "cuda":
        seen = torch.cuda.get_device_properties(world.device)
        facts |= {"device": seen.name, "memory_bytes": seen.total_memory}
    return facts


def _time_format(name: str, bench: Workbench, extent: Extent, world: dist.World) -> None:
    pieces = ("norm", "frozen_norm", "cast", "residual", "add", "gate", "rotary", "adapter", "entropy", "accumulate")
    jobs = [("product", bench.product, [extent.tokens, extent.widths, extent.widths], 1.0)]
    jobs += [("attention", bench.attention, [extent.lengths, extent.heads], 1 / HEADS)]
    jobs += [(piece, type(bench).__dict__[piece].__get__(bench), [extent.values], 1.0) for piece in pieces]
    jobs += [(piece, act, [extent.values], 1.0) for piece, act in (("zero", bench.zero), ("optimizer", bench.optimizer))]
    for piece, make, axes, share in jobs:
        seconds: dict[str, list[float]] = {}
        for sizes in itertools.product(*axes):
            for direction, act in make(*sizes).items():
                seconds.setdefault(direction, []).append(share * _median(act, extent, world))
        for direction, found in seconds.items():
            table = Table(tuple(map(tuple, axes)), tuple(found))
            _say(world, Line(f"{name} {piece} {direction}", asdict(table)))


def _median(act: Act, extent: Extent, world: dist.World) -> float:
    """Time ``act`` over and over within the budget, all ranks beginning together; the median of the seconds."""
    act()
    dist.wait_for_all()
    found: list[float] = []
    begin = time.perf_counter()
    while len(found) < LEAST or (len(found) < MOST and time.perf_counter() - begin < extent.budget_seconds):
        if len(found) >= 1 and time.perf_counter() - begin > 10 * extent.budget_seconds:
            break  # one that is so long is not disturbed much
        start = time.perf_counter()
        act()
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def _exchange(size: int, extent: Extent, world: dist.World) -> float:
    numbers = torch.zeros(size // 4, device=world.device)
    found = []
    for _ in range(extent.exchanges):
        dist.wait_for_all()
        start = time.perf_counter()
        torch_dist.all_reduce(numbers)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def _say(world: dist.World, line: Line) -> None:
    if world.is_first:
        print(json.dumps(asdict(line)), flush=True)


if __name__ == "__main__":
    main(Extent(**json.loads(sys.argv[1])))
    leave(0)
