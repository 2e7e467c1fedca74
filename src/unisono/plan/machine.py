"""What ``unisono plan --calibrate`` has measured on this machine: read from its file, written to it, refused elsewhere.

The file is ``machine.json`` in ``~/.cache/unisono`` (``$XDG_CACHE_HOME/unisono`` where that is set). It holds times of
single operations, each a table over sizes; ``plan.measured`` puts an update together from them. Times of another
machine, another CPU or another torch say nothing about this one: they are refused in words.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import socket
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from unisono.durable import replace_file
from unisono.errors import ConfigError

VERSION = 1
CALIBRATE = "unisono plan --calibrate"


@dataclass(frozen=True)
class Table:
    """Seconds measured on a grid of sizes: ``seconds`` in row-major order of ``axes``."""

    axes: tuple[tuple[float, ...], ...]
    seconds: tuple[float, ...]

    def at(self, *sizes: float) -> float:
        """Return the seconds for ``sizes``: linear in logarithms between the measured ones, and on beyond the ends.

        That is exact for what takes c x size^p, and follows the bend from overhead to throughput.
        """
        if any(size <= 0 for size in sizes):
            return 0.0
        total = 0.0
        corners = [_neighbours(axis, size) for axis, size in zip(self.axes, sizes, strict=True)]
        for chosen in itertools.product(*corners):
            weight = math.prod(share for _, share in chosen)
            total += weight * math.log(self.seconds[self._place([index for index, _ in chosen])])
        return math.exp(total)

    def _place(self, indices: Sequence[int]) -> int:
        place = 0
        for axis, index in zip(self.axes, indices, strict=True):
            place = place * len(axis) + index
        return place


def _neighbours(axis: Sequence[float], size: float) -> list[tuple[int, float]]:
    """Return the two measured sizes around ``size`` (or the last two towards it), each with its share."""
    if len(axis) == 1:
        return [(0, 1.0)]
    high = min(max(bisect_left(axis, size), 1), len(axis) - 1)
    share = math.log(size / axis[high - 1]) / math.log(axis[high] / axis[high - 1])
    return [(high - 1, 1 - share), (high, share)]


@dataclass(frozen=True)
class Rates:
    """Times of single operations when ``ranks`` ranks work at the same time, each with ``threads`` threads.

    ``tables`` by name: format, operation, direction (``bf16 product forward``). An exchange of b bytes among all ranks
    takes ``alpha_seconds + b * seconds_per_byte``; both are 0 for one rank.
    """

    ranks: int
    threads: int
    tables: Mapping[str, Table]
    alpha_seconds: float = 0.0
    seconds_per_byte: float = 0.0


@dataclass(frozen=True)
class Identity:
    """What makes a machine another one, as far as times go. ``device``: its GPU, or its CPU."""

    host: str
    device: str
    cores: int
    torch: str


@dataclass(frozen=True)
class Measured:
    """All that was measured, where and when. ``memory_bytes``: of one GPU; 0 on a CPU."""

    identity: Identity
    date: str
    rates: tuple[Rates, ...]
    on_gpu: bool = False
    has_bf16: bool = False
    memory_bytes: int = 0

    def for_ranks(self, ranks: int) -> Rates | None:
        """Return what was measured with so many ranks."""
        return next((each for each in self.rates if each.ranks == ranks), None)


def fit_exchange(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit ``alpha + beta * size`` by least squares of the relative errors; neither is negative.

    Relative: the smallest message says as much as the largest. Minimises sum ((alpha + beta x - y) / y)^2, whose normal
    equations are those of ordinary least squares with weights 1 / y^2.
    """
    weights = [1 / y**2 for y in seconds]
    total = sum(weights)
    mean_x = sum(w * x for w, x in zip(weights, sizes, strict=True)) / total
    mean_y = sum(w * y for w, y in zip(weights, seconds, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, sizes, strict=True))
    together = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in zip(weights, sizes, seconds, strict=True))
    beta = max(0.0, together / spread if spread else 0.0)
    alpha = mean_y - beta * mean_x
    if alpha >= 0:
        return alpha, beta
    return 0.0, sum(w * x * y for w, x, y in zip(weights, sizes, seconds, strict=True)) / sum(
        w * x * x for w, x in zip(weights, sizes, strict=True)
    )


def machine_file() -> Path:
    """Return where the measurements are kept."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "unisono" / "machine.json"


def write_measured(measured: Measured, file: Path) -> None:
    """Put the file there whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, json.dumps({"version": VERSION, **asdict(measured)}).encode() + b"\n")


def read_measured(file: Path, here: Identity | None = None) -> Measured | None:
    """Read the file; None if there is none. ConfigError if it is damaged, of another version or another machine.

    ``here`` is this machine (default: looked at). Where the file is of a GPU, the names of devices are not compared:
    to ask for one would take torch.
    """
    if not file.is_file():
        return None
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        if raw.pop("version") != VERSION:
            raise ConfigError(
                "it was written by another version of unisono", where=str(file), hint=f"run {CALIBRATE} again"
            )
        measured = _understood(raw)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"it cannot be read: {error}", where=str(file), hint=f"run {CALIBRATE} again") from None
    _refuse_another(measured, here or this_machine(), file)
    return measured


def _understood(raw: dict[str, Any]) -> Measured:
    rates = [
        Rates(**{**each, "tables": {name: _table(table) for name, table in each["tables"].items()}})
        for each in raw["rates"]
    ]
    return Measured(**{**raw, "identity": Identity(**raw["identity"]), "rates": tuple(rates)})


def _table(raw: dict[str, Any]) -> Table:
    table = Table(tuple(map(tuple, raw["axes"])), tuple(map(float, raw["seconds"])))
    if math.prod(map(len, table.axes)) != len(table.seconds) or min(table.seconds) <= 0:
        raise ValueError("a table is not whole")
    return table


def _refuse_another(measured: Measured, here: Identity, file: Path) -> None:
    """Name everything that is different."""
    theirs, ours = asdict(measured.identity), asdict(here)
    if measured.on_gpu:
        del ours["device"]
    different = [f"{name} {theirs[name]}, not {value}" for name, value in ours.items() if theirs[name] != value]
    if different:
        raise ConfigError(
            f"it was measured elsewhere: {'; '.join(different)}",
            where=str(file),
            hint=f"run {CALIBRATE} on this machine",
        )


def this_machine(device: str | None = None) -> Identity:
    """Look at this machine, without torch; ``device`` names its GPU."""
    from unisono.cores import usable_cores

    return Identity(socket.gethostname(), device or cpu_name(), usable_cores(), version("torch"))


def cpu_name(info: Path = Path("/proc/cpuinfo")) -> str:
    """Name the CPU with what distinguishes it, for clouds call many by one name: AMD EPYC (family 26, model 2)."""
    facts = _cpu_facts(info)
    if "model name" not in facts:
        return platform.processor() or platform.machine()
    return f"{facts['model name']} (family {facts.get('cpu family')}, model {facts.get('model')})"


def cpu_multiplies_bf16(info: Path = Path("/proc/cpuinfo")) -> bool:
    """Tell whether the CPU multiplies bf16, as ``precision`` asks torch; False where the system does not say."""
    return bool({"avx512_bf16", "amx_tile"} & set(_cpu_facts(info).get("flags", "").split()))


def _cpu_facts(info: Path) -> dict[str, str]:
    """Return the facts of the first core."""
    if not info.is_file():
        return {}
    first = info.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
