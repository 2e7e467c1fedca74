"""The lines a run leaves: one JSON object per update, and per-rank events. Append-only, cut back on resume."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from unisono.durable import replace_file
from unisono.errors import OutputError

VALIDATIONS = {"validation", "generation"}  # kinds of lines


class JsonLines:
    """A file of JSON lines, opened for appending; each line reaches the file as it is written."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file.open("ab")

    def write(self, values: dict[str, Any]) -> None:
        """Append one object."""
        self._file.write(orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Make it durable and close it."""
        os.fsync(self._file.fileno())
        self._file.close()


def cut_after(file: Path, update: int, *, validated: int | None = None) -> None:
    """Drop the lines of updates after ``update`` (they will be done again) and a torn last line; by one rename.

    Lines of validations after update ``validated`` go too: that validation was cut short and will be done again.

    Raises OutputError for a line that no run has written.
    """
    if not file.is_file():
        return
    kept = []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            values = orjson.loads(line)
            is_validation = values.get("kind") in VALIDATIONS
            if values["update"] <= (min(update, validated) if is_validation and validated is not None else update):
                kept.append(line + b"\n")
        except orjson.JSONDecodeError:
            break
        except (KeyError, TypeError, AttributeError):
            raise OutputError(
                "this is not a line of a run", where=f"{file}:{number}", hint="choose another run.output_dir"
            ) from None
    replace_file(file, b"".join(kept))


def update_lines(file: Path) -> list[dict[str, Any]]:
    """Read the lines of updates that tell each rank's seconds; those of an older version do not."""
    lines = [orjson.loads(line) for line in file.read_bytes().splitlines()]
    return [line for line in lines if "kind" not in line and "seconds_by_rank" in line]


@dataclass
class Session:
    """The updates that this process has done: their number, and their seconds by cause in all.

    ``first_wait_seconds`` is the part of ``data`` that the first update waited: nothing can have been built before it.
    """

    num_updates: int = 0
    seconds_by_cause: dict[str, float] = field(default_factory=dict)
    first_wait_seconds: float = 0.0

    def add(self, parts: dict[str, float]) -> None:
        """Count an update in."""
        if self.num_updates == 0:
            self.first_wait_seconds = parts.get("data", 0.0)
        self.num_updates += 1
        for cause, seconds in parts.items():
            self.seconds_by_cause[cause] = self.seconds_by_cause.get(cause, 0.0) + seconds

    @property
    def data_wait_share(self) -> float:
        """Share of the updates' time that was spent waiting for data, the wait for the first batch left out of both."""
        everything = sum(self.seconds_by_cause.values()) - self.first_wait_seconds
        waited = self.seconds_by_cause.get("data", 0.0) - self.first_wait_seconds
        return max(0.0, waited / everything) if everything > 0 else 0.0

    def sentence(self, share: float) -> str:
        """Say how large a share of the time was waiting for data."""
        return f"waited {share:.1%} of the time for data (besides {self.first_wait_seconds:.1f} s for the first batch)"


OTHER = "other"


class Spans:
    """Seconds by cause: at every moment the time belongs to one cause, so that the parts add up to the whole.

    ``listener`` hears each cause as it begins.
    """

    def __init__(self, listener: Callable[[str], None] = lambda cause: None) -> None:
        self.session = Session()
        self._listener = listener
        self._seconds: dict[str, float] = {}
        self._cause = OTHER
        self._start = self._entered = time.perf_counter()

    def enter(self, cause: str) -> None:
        """From now on the time belongs to ``cause``."""
        now = time.perf_counter()
        self._seconds[self._cause] = self._seconds.get(self._cause, 0.0) + now - self._entered
        self._cause, self._entered = cause, now
        self._listener(cause)

    @contextmanager
    def span(self, cause: str) -> Iterator[None]:
        """Give the time inside to ``cause``, and what follows to what was before."""
        before = self._cause
        self.enter(cause)
        yield
        self.enter(before)

    def so_far(self, *causes: str) -> float:
        """Return the seconds of finished stretches of these causes since the last take."""
        return sum(self._seconds.get(cause, 0.0) for cause in causes)

    def give(self, cause: str, parts: dict[str, float]) -> None:
        """Give seconds that were counted as ``cause`` to others, by name."""
        self._seconds[cause] = self._seconds.get(cause, 0.0) - sum(parts.values())
        for other, seconds in parts.items():
            self._seconds[other] = self._seconds.get(other, 0.0) + seconds

    def take(self) -> tuple[float, dict[str, float]]:
        """Return the seconds since the last take and their parts, and start anew."""
        self.enter(self._cause)
        parts = {OTHER: 0.0} | self._seconds
        total = self._entered - self._start
        self._start, self._seconds = self._entered, {}
        return total, parts

    def take_update(self) -> tuple[float, dict[str, float]]:
        """Take, and count it as an update of the session."""
        total, parts = self.take()
        self.session.add(parts)
        return total, parts
