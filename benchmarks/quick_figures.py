"""What ``quick.py`` makes of its trials: ratios, the bounds they are held against, the table. No torch in here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

FAR_BELOW = 0.7  # of what is stored: a busy machine moves these ratios by a tenth or two
KINDS = {"amx": "amx_bf16", "avx512_bf16": "avx512_bf16"}  # by the flag of /proc/cpuinfo, the fastest first
OTHER = "other"
BOUNDED = ("times_tutorial", "share_of_floor", "two_by_one")
ANSWER = "floor: "  # how a floor's answer begins
STORE = "python benchmarks/quick.py --store"


@dataclass(frozen=True)
class Trial:
    """What one process run has shown, by update: seconds and useful tokens; of ours also what was not hidden.

    ``exposed`` and ``waiting``: shares of all ranks' seconds. Updates that warm up are not in here.
    """

    who: str
    seconds: Mapping[str, float]
    tokens: Mapping[str, int]
    exposed: float = 0.0
    waiting: float = 0.0


@dataclass(frozen=True)
class Floor:
    """Seconds of the slowest rank: by update the linear layers' products and attention's, and one exchange."""

    products: Mapping[str, float]
    attention: Mapping[str, float]
    exchange: float


@dataclass(frozen=True)
class Figures:
    """Ratios, and the seconds of an update that they come from; medians over trials. None: not measured in time."""

    times_tutorial: float
    share_of_floor: float | None
    share_of_floor_one: float | None
    two_by_one: float | None
    exposed: float
    waiting: float
    update_seconds: float
    update_seconds_one: float | None
    tutorial_seconds: float
    products_seconds: float | None
    products_seconds_one: float | None
    attention_seconds: float | None
    exchange_seconds: float | None


def event_lines(folder: Path, rank: int) -> dict[int, dict[str, Any]]:
    """Read what a rank of the run in ``folder`` noted of its updates, by number."""
    text = (folder / "events" / f"rank{rank}.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return {line["update"]: line for line in lines if "kind" not in line}


def share_of(cause: str, lines: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of a cause in the seconds of all these lines of updates."""
    total: float = math.fsum(line["seconds"] for line in lines)
    return math.fsum(line["spans"].get(cause, 0.0) for line in lines) / total


def cpu_kind(info: str) -> str:
    """Return what the CPU multiplies bf16 with, from the text of /proc/cpuinfo: the ratios depend on it."""
    flags = {flag for line in info.splitlines() if line.startswith("flags") for flag in line.split()}
    return next((kind for kind, flag in KINDS.items() if flag in flags), OTHER)


def figures(trials: Sequence[Trial], floors: Mapping[str, Sequence[Floor]]) -> Figures:
    """Sum up. ``trials`` are of ours-2, tutorial-2 and, where time allowed, ours-1; ``floors`` by ours-2, ours-1."""
    two, one, tutorial = (_update_seconds(trials, who) for who in ("ours-2", "ours-1", "tutorial-2"))
    own = [each for each in trials if each.who == "ours-2"]
    assert two is not None and tutorial is not None, "both are always measured"
    products, products_one = (_floor_seconds(floors.get(who, ()), "products") for who in ("ours-2", "ours-1"))
    found = floors.get("ours-2", ())
    speed, speed_of_tutorial = _speed(trials, "ours-2"), _speed(trials, "tutorial-2")
    return Figures(
        times_tutorial=speed / speed_of_tutorial,
        share_of_floor=products and products / two,
        share_of_floor_one=products_one and one and products_one / one,
        two_by_one=one and speed / _speed(trials, "ours-1"),
        exposed=median(each.exposed for each in own),
        waiting=median(each.waiting for each in own),
        update_seconds=two,
        update_seconds_one=one,
        tutorial_seconds=tutorial,
        products_seconds=products,
        products_seconds_one=products_one,
        attention_seconds=_floor_seconds(found, "attention"),
        exchange_seconds=median(each.exchange for each in found) if found else None,
    )


def _update_seconds(trials: Sequence[Trial], who: str) -> float | None:
    """Return the mean update's seconds: of each update the median over the trials, which train the same samples."""
    own = [each.seconds for each in trials if each.who == who]
    return _mean_of_medians(own) if own else None


def _floor_seconds(floors: Sequence[Floor], part: str) -> float | None:
    own = [asdict(each)[part] for each in floors]
    return _mean_of_medians(own) if own else None


def _mean_of_medians(turns: Sequence[Mapping[str, float]]) -> float:
    by_update = [median(turn[update] for turn in turns) for update in turns[0]]
    return math.fsum(by_update) / len(by_update)


def _speed(trials: Sequence[Trial], who: str) -> float:
    """Return useful tokens a second, the median over the trials."""
    own = [each for each in trials if each.who == who]
    return median(sum(each.tokens.values()) / math.fsum(each.seconds.values()) for each in own)


def problems(found: Figures, bounds: Mapping[str, float]) -> list[str]:
    """Name every ratio that is far below its stored one: what it is, what it may be, what to do."""
    values = asdict(found)
    return [
        f"{WORDS[name]}: {values[name]:.3g}, at least {FAR_BELOW * bounds[name]:.3g} is needed "
        f"({FAR_BELOW:g} x the stored {bounds[name]:.3g})"
        for name in BOUNDED
        if values[name] is not None and values[name] < FAR_BELOW * bounds[name]
    ]


def read_bounds(file: Path, kind: str, compute: str) -> dict[str, float] | None:
    """Return what is stored for this kind of CPU and this format; None where nothing is."""
    stored = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    entry = stored.get(kind, {}).get(compute)
    return None if entry is None else entry["ratios"]


def store_bounds(file: Path, kind: str, compute: str, found: Figures, about: Mapping[str, Any]) -> None:
    """Store the measured ratios for this kind of CPU and this format; others stay. SystemExit if one is missing."""
    ratios = {name: value for name, value in asdict(found).items() if name in BOUNDED}
    missing = [WORDS[name] for name, value in ratios.items() if value is None]
    if missing:
        raise SystemExit(f"error: not stored, for there was no time for: {', '.join(missing)}; raise --limit")
    stored = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    rounded = {name: round(value, 3) for name, value in ratios.items()}
    stored.setdefault(kind, {})[compute] = {"ratios": rounded, **about}
    file.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n", encoding="utf-8")


WORDS = {
    "times_tutorial": "times as fast as the loop of a tutorial",
    "share_of_floor": "share of an update that its matrix products alone take",
    "two_by_one": "2 processes against 1 with all threads, tokens a second",
}
WANTED = {"share_of_floor": "0.40", "two_by_one": "0.97"}


def table(found: Figures, bounds: Mapping[str, float] | None) -> list[str]:
    """Return the table that a person reads: ratios first, then the seconds of an update they come from."""
    values = asdict(found)
    rows = [("ratio", "here", "wanted", "stored", "fails below")]
    for name in BOUNDED:
        stored = [f"{bounds[name]:.2f}", f"{FAR_BELOW * bounds[name]:.2f}"] if bounds else ["-", "-"]
        rows.append((WORDS[name], _ratio(values[name]), WANTED.get(name, "-"), *stored))
    rows += [
        ("the same share, 1 process with all threads", _ratio(found.share_of_floor_one), "-", "-", "-"),
        ("exchange of gradients that is not hidden, of an update", f"{found.exposed:.1%}", "under 5%", "-", "-"),
        ("waiting for the slower process, of an update", f"{found.waiting:.1%}", "-", "-", "-"),
    ]
    seconds = [
        ("seconds of an update", "2 processes", "1 process"),
        ("unisono", _seconds(found.update_seconds), _seconds(found.update_seconds_one)),
        ("  its linear layers' products alone", _seconds(found.products_seconds), _seconds(found.products_seconds_one)),
        ("  its attention's products alone", _seconds(found.attention_seconds), "-"),
        ("  its gradients' all-reduce alone", _seconds(found.exchange_seconds), "-"),
        ("the loop of a tutorial", _seconds(found.tutorial_seconds), "-"),
    ]
    return [*_lines(rows), "", *_lines(seconds)]


def _ratio(value: float | None) -> str:
    return "no time" if value is None else f"{value:.2f}"


def _seconds(value: float | None) -> str:
    return "no time" if value is None else f"{value:.2f}"


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    cells = [[row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return [lines[0], rule, *lines[1:]]
