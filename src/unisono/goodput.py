"""Where the time of a run went: productive seconds, and lost ones by cause; they add up to its wall time.

Every moment belongs to the line of the ledger that ends it. An update is productive once: what a restart threw away and
did again was lost (``redone``), and so was the piece of an update that a fault cut off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

VERSION = 1
CAUSES = ("start", "data", "validation", "checkpoint", "redone", "restart", "hang", "finish")
_OF_KIND = {"validation": "validation", "generation": "validation", "checkpoint": "checkpoint", "close": "finish"}
_LEAST_SHARE = 0.001  # of the wall time; less is not worth a word
Line = dict[str, Any]


@dataclass
class Fault:
    """One failure: when, at which update, of which rank; what it cost.

    ``updates_redone``: updates that had been done and were lost; ``recovery_seconds``: until the end of the first
    update that is new, as far as the run was running. None: that never came.
    """

    time: float
    rank: int
    exit_code: int
    update: int
    what: str
    updates_redone: int | None = None
    recovery_seconds: float | None = None


@dataclass
class Account:
    """All launches of a run. ``away_seconds`` lie between them and belong to no wall time."""

    wall_seconds: float = 0.0
    productive_seconds: float = 0.0
    lost_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    away_seconds: float = 0.0
    num_launches: int = 0
    num_updates: int = 0
    faults: list[Fault] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """Return the productive share of the wall time."""
        return self.productive_seconds / self.wall_seconds if self.wall_seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return what goes into goodput.json."""
        plain = {key: value for key, value in vars(self).items() if key != "faults"}
        return {"version": VERSION, "goodput": self.goodput, **plain, "faults": [vars(each) for each in self.faults]}

    def sentences(self) -> Iterator[str]:
        """Say it in a line, and what faults have cost in another."""
        lost = sorted(self.lost_seconds.items(), key=lambda item: -item[1])
        said = [f"{cause} {seconds:.1f} s" for cause, seconds in lost if seconds > _LEAST_SHARE * self.wall_seconds]
        times = f" in {self.num_launches} starts" if self.num_launches > 1 else ""
        yield (
            f"goodput {self.goodput:.1%}: {self.productive_seconds:.1f} of {self.wall_seconds:.1f} s{times} went into "
            f"{counted(self.num_updates, 'update')}" + (f"; the rest: {', '.join(said)}" if said else "")
        )
        if self.faults:
            redone = sum(fault.updates_redone or 0 for fault in self.faults)
            recovered = [f.recovery_seconds for f in self.faults if f.recovery_seconds is not None]
            longest = f"; at most {max(recovered):.1f} s from a fault to the next new update" if recovered else ""
            yield f"{counted(len(self.faults), 'fault')}: {counted(redone, 'update')} done again{longest}"


def counted(number: int, what: str) -> str:
    """Say a number of things: 1 fault, 2 faults."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def running_seconds(lines: Sequence[Line], now: float) -> float:
    """Return how long the run has been running until ``now``, all its launches together; the last one still is."""
    spans: dict[str, list[float]] = {}
    for line in lines:
        spans.setdefault(line["launch"], []).append(line["time"])
    ends = [times[-1] for times in spans.values()]
    return sum(end - times[0] for end, times in zip([*ends[:-1], now], spans.values()))


def account(lines: Sequence[Line]) -> Account:
    """Add up a ledger, whose lines are in the order of time."""
    whole, survivors = Account(), _survivors(lines)
    launches: dict[str, list[tuple[Line, bool]]] = {}
    for place, line in enumerate(lines):
        launches.setdefault(line["launch"], []).append((line, place in survivors))
    spans = [(launch[0][0]["time"], launch[-1][0]["time"]) for launch in launches.values()]
    for launch in launches.values():
        _add_launch(whole, launch)
    whole.away_seconds = sum(max(0.0, begin - end) for (_, end), (begin, _) in pairwise(spans))
    whole.num_launches, whole.num_updates = len(launches), len(survivors)
    whole.faults = list(_faults(lines, spans))
    return whole


def _survivors(lines: Sequence[Line]) -> set[int]:
    """Return the places of the updates whose work is in the result."""
    place_of: dict[int, int] = {}
    for place, line in enumerate(lines):
        if line["kind"] == "update":
            place_of[line["update"]] = place
        elif line["kind"] == "session":
            place_of = {update: where for update, where in place_of.items() if update <= line["update"]}
    return set(place_of.values())


def _add_launch(whole: Account, launch: Sequence[tuple[Line, bool]]) -> None:
    lost: Counter[str] = Counter()
    is_ready, getting_ready = False, "start"
    now = launch[0][0]["time"]
    for line, survives in launch[1:]:
        seconds, kind = line["time"] - now, line["kind"]
        now = line["time"]
        if kind == "update" and survives:
            waited = min(seconds, line["data"])
            lost["data"] += waited
            whole.productive_seconds += seconds - waited
            continue
        cause = _OF_KIND.get(kind, "redone" if is_ready else getting_ready)
        if kind == "end":
            cause = "finish" if is_ready else getting_ready
        elif kind == "fault" and line["is_hang"]:
            cause = "hang"
        lost[cause] += seconds
        if kind == "session":
            is_ready = True
        elif kind == "fault":
            is_ready, getting_ready = False, "restart"
    whole.wall_seconds += now - launch[0][0]["time"]
    for cause, seconds in lost.items():
        whole.lost_seconds[cause] += seconds


def _faults(lines: Sequence[Line], spans: Sequence[tuple[float, float]]) -> Iterator[Fault]:
    furthest = 0
    for place, line in enumerate(lines):
        if line["kind"] == "update":
            furthest = max(furthest, line["update"])
        if line["kind"] != "fault":
            continue
        fault = Fault(line["time"], line["rank"], line["exit_code"], line["update"], line["what"])
        later = lines[place + 1 :]
        resumed = next((each for each in later if each["kind"] == "session"), None)
        if resumed is not None:
            fault.updates_redone = max(0, furthest - resumed["update"])
        new = next((each for each in later if each["kind"] == "update" and each["update"] > furthest), None)
        if new is not None:
            within = (min(end, new["time"]) - max(begin, fault.time) for begin, end in spans)
            fault.recovery_seconds = sum(max(0.0, seconds) for seconds in within)
        yield fault
