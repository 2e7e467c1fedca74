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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as torch_dist

from unisono import dist
from unisono.bench.calibrate import Extent, Line
from unisono.bench.pieces import DOCUMENTS, HEADS, Act, Workbench
from unisono.bench.probe import probe
from unisono.plan.machine import Table
from unisono.plan.measured import PROBE_LAYERS, PROBE_RANK
from unisono.precision import multiplies_bf16
from unisono.worker import leave

MOST, FEWEST = 10, 3  # repetitions
CACHE_BYTES = 8 * 2**20  # more than a core's own caches hold


def main(extent: Extent) -> None:
    """Time everything."""
    world = dist.find_world()
    dist.join(world, 120)
    _say(world, Line("facts", _facts(world)))
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        if name == "fp32" or multiplies_bf16(world.device):
            _time_format(name, Workbench(world.device, dtype), extent, world)
            _time_probes(name, extent, world)
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
    """Time all operations twice over, minutes of other work apart, and keep the better: others only disturb."""
    sweeps = [dict(_sweep(name, bench, extent, world)) for _ in range(2)]
    for table, (axes, first) in sweeps[0].items():
        second = sweeps[1][table][1]
        seconds = tuple(map(min, first, second))
        _say(
            world, Line(table, {**asdict(Table(axes, seconds)), "again": statistics.median(map(_apart, first, second))})
        )


def _time_probes(name: str, extent: Extent, world: dist.World) -> None:
    """Time whole updates of models that compute next to nothing, by their number of layers."""
    for kind, rank in (("full", None), ("lora", PROBE_RANK)):
        seconds = []
        for layers in PROBE_LAYERS:
            update = probe(layers, rank, name, world)
            update()
            seconds.append(statistics.median(_seconds(update, world) for _ in range(extent.updates)))
        _say(world, Line(f"{name} update {kind}", {"axes": [PROBE_LAYERS], "seconds": seconds, "again": 0.0}))


def _apart(first: float, second: float) -> float:
    """Return by which share two times differ."""
    return max(first, second) / min(first, second) - 1


def _sweep(
    name: str, bench: Workbench, extent: Extent, world: dist.World
) -> Iterator[tuple[str, tuple[tuple[tuple[float, ...], ...], list[float]]]]:
    """Yield each table's name, axes and seconds."""
    jobs: list[tuple[str, Callable[..., dict[str, Act]], list[Sequence[int]], float]] = [
        ("product", bench.product, [extent.tokens, extent.widths, extent.widths], 1.0),
        ("attention", bench.attention, [extent.lengths, extent.heads], 1 / (HEADS * DOCUMENTS)),
        *((piece.__name__, piece, [extent.values], 1.0) for piece in bench.elementwise),
    ]
    for piece, make, axes, share in jobs:
        seconds: dict[str, list[float]] = {}
        for sizes in itertools.product(*axes):
            for direction, act in make(*sizes).items():
                seconds.setdefault(direction, []).append(share * _median(act, extent, world))
        for direction, found in seconds.items():
            yield f"{name} {piece} {direction}", (tuple(map(tuple, axes)), found)
        _say(world, Line("progress", piece))


def _median(act: Act, extent: Extent, world: dist.World) -> float:
    """Time ``act`` over and over within the budget, all ranks beginning together; the median of the seconds.

    A core's caches are filled with something else before each: in an update, what an operation reads has mostly been
    written many operations ago, or is a weight that was last used in the update before.
    """
    act()
    other = torch.zeros(CACHE_BYTES // 4, device=world.device)
    dist.wait_for_all()
    found: list[float] = []
    while len(found) < FEWEST or (len(found) < MOST and sum(found) < extent.budget_seconds):
        other.add_(1.0)
        found.append(_seconds(act, world))
    return statistics.median(found)


def _seconds(act: Act, world: dist.World) -> float:
    start = time.perf_counter()
    act()
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return time.perf_counter() - start


def _exchange(size: int, extent: Extent, world: dist.World) -> float:
    """Time an all-reduce of ``size`` bytes, all ranks beginning together."""
    numbers = torch.zeros(size // 4, device=world.device)
    found = []
    for _ in range(extent.updates):
        dist.wait_for_all()
        found.append(_seconds(lambda: torch_dist.all_reduce(numbers), world))
    return statistics.median(found)


def _say(world: dist.World, line: Line) -> None:
    if world.is_first:
        print(json.dumps(asdict(line)), flush=True)


if __name__ == "__main__":
    main(Extent(**json.loads(sys.argv[1])))
    leave(0)
