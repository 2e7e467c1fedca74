"""Times of a made-up machine: each operation takes a microsecond, and a hundred picoseconds a value or product."""

from __future__ import annotations

import itertools
import math

from unisono.plan.machine import Identity, Measured, Rates, Table

HERE = Identity("host", "a CPU", 2, "2.13.0")
_AXES: dict[str, tuple[tuple[float, ...], ...]] = {
    "product": ((64, 1024), (8, 512), (8, 512)),
    "attention": ((32, 512), (32, 128)),
    "update": ((2, 6),),
}
_PIECES = {
    "product": ("forward", "input", "weight"),
    "attention": ("forward", "backward"),
    **dict.fromkeys(("norm", "frozen_norm", "cast", "residual", "gate", "rotary", "adapter"), ("forward", "backward")),
    **dict.fromkeys(("add", "entropy", "accumulate", "zero"), ("forward",)),
    "optimizer": ("forward", "clip"),
    "update": ("full", "lora"),
}


def made_up_rates(ranks: int = 1) -> Rates:
    """Return the times with so many ranks."""
    tables = {
        f"{compute} {piece} {direction}": _table(_AXES.get(piece, ((2**13, 2**24),)), 1e-3 if piece == "update" else 0)
        for compute in ("fp32", "bf16")
        for piece, directions in _PIECES.items()
        for direction in directions
    }
    return Rates(ranks, 1, tables, 1e-4 * (ranks > 1), 1e-9 * (ranks > 1))


def made_up(*ranks: int) -> Measured:
    """Return a whole calibration."""
    return Measured(HERE, "2026-01-01T00:00:00+00:00", tuple(map(made_up_rates, ranks)), has_bf16=True)


def _table(axes: tuple[tuple[float, ...], ...], least: float) -> Table:
    return Table(axes, tuple(least + 1e-6 + 1e-10 * math.prod(sizes) for sizes in itertools.product(*axes)))
