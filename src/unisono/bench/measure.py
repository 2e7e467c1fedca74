"""What a short run on some ranks has shown, as numbers; no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from unisono.config.schema import RunConfig

WARM_UP = 2  # updates that do not count


def short_run(config: RunConfig, ranks: int, updates: int) -> dict[str, object]:
    """Return what makes a short run of the person's own.

    Validation files are left out; a share is not, since other data would be trained without it.
    """
    settings: dict[str, object] = {
        "launch.ranks": ranks,
        "launch.max_restarts": 0,
        "length.updates": updates,
        "checkpoint.every": updates,
        "validate.generate": 0,
    }
    if not isinstance(config.data.validation, float):
        settings["data.validation"] = 0
    return settings


@dataclass(frozen=True)
class Row:
    """A number of ranks. Shares are of the ranks' time; ``mfu`` is None where the model's products are not known.

    ``micro_batch_tokens``: the largest micro-batch there was; ``tokens_per_second``: those of the data, of all ranks,
    without padding; ``speed_up`` and ``efficiency`` (speed-up by rank) are relative to the first row.
    """

    ranks: int
    updates_per_second: float
    tokens_per_second: float
    micro_batch_tokens: int
    memory_bytes: int
    communication: float
    waiting: float
    data: float
    mfu: float | None = None
    speed_up: float = 1.0
    efficiency: float = 1.0


def row_of(
    ranks: int,
    updates: Mapping[int, Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
) -> Row:
    """Sum up a run: rank 0's lines by update, the lines of updates of all ranks, and its summary."""
    counted = [line for number, line in updates.items() if number > WARM_UP]
    of_ranks = [line for line in events if line["update"] > WARM_UP]
    seconds = math.fsum(line["seconds"] for line in of_ranks)

    def share(cause: str) -> float:
        return math.fsum(line["spans"].get(cause, 0.0) for line in of_ranks) / seconds

    return Row(
        ranks=ranks,
        updates_per_second=1 / median(line["seconds"] for line in counted),
        tokens_per_second=median(line["tokens_per_second"] for line in counted),
        micro_batch_tokens=max(line["micro_batch_tokens"] for line in events),
        memory_bytes=summary["peak_memory_bytes"],
        communication=share("communication"),
        waiting=share("waiting"),
        data=share("data"),
    )


def flops_per_second(
    updates: Mapping[int, Mapping[str, Any]], ids: Mapping[int, Sequence[int]], flops: Callable[[int, int, int], float]
) -> float:
    """Return the model's operations a second, the median of the updates.

    ``flops`` gives those of an update of (samples, tokens, targets).
    """
    counted = [number for number in updates if number > WARM_UP]
    speeds: list[float] = [
        flops(len(ids[number]), updates[number]["num_tokens"], updates[number]["num_targets"])
        / updates[number]["seconds"]
        for number in counted
    ]
    return median(speeds)


def related(rows: Sequence[Row]) -> list[Row]:
    """Fill in speed-up and efficiency."""
    if not rows:
        return []
    first = rows[0]
    found = []
    for row in rows:
        speed_up = row.tokens_per_second / first.tokens_per_second
        found.append(replace(row, speed_up=speed_up, efficiency=speed_up * first.ranks / row.ranks))
    return found


def table(rows: Sequence[Row]) -> list[str]:
    """Show the rows as a table for a terminal and for Markdown."""
    head = (
        "ranks",
        "largest micro-batch",
        "it/s",
        "tokens/s",
        "GiB a rank",
        "speed-up",
        "efficiency",
        "communication",
        "waiting",
        "data",
        "MFU",
    )
    cells = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    lines = ["| " + " | ".join(cell.rjust(width) for cell, width in zip(line, widths)) + " |" for line in cells]
    return [lines[0], "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|", *lines[1:]]


def _cells(row: Row) -> tuple[str, ...]:
    return (
        f"{row.ranks}",
        f"{row.micro_batch_tokens:,} tokens",
        f"{row.updates_per_second:.3g}",
        f"{row.tokens_per_second:,.0f}",
        f"{row.memory_bytes / 2**30:.2f}",
        f"{row.speed_up:.2f}",
        f"{row.efficiency:.0%}",
        f"{row.communication:.1%}",
        f"{row.waiting:.1%}",
        f"{row.data:.1%}",
        "-" if row.mfu is None else f"{row.mfu:.1%}",
    )
