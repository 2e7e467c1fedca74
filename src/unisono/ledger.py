"""The diary of a run's time: ``ledger.jsonl`` in the run folder, a line per moment, kept through all its launches.

Rank 0 writes what was done; the launcher, what it started and what failed. Every line has ``time`` (seconds since the
epoch), ``launch`` (which start of the run it belongs to) and ``kind``:

* ``launch``: somebody started the run; ``start``: its ranks are started (again);
* ``session``: they are ready to go on after ``update`` updates, by ``strategy``, with ``gradient_bytes`` to exchange;
* ``update``, ``validation``, ``generation``, ``checkpoint``: that ended; an update says how long it waited (``data``);
* ``close``: the last update is done; ``fault``: a rank failed; ``end``: the launch ended with ``code``.

A line is one write to a file that is opened for appending: two processes can write, and one that is killed leaves
whole lines.
"""

from __future__ import annotations

import errno
import os
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import psutil

from unisono.durable import replace_file
from unisono.goodput import Account, Line, account, running_seconds
from unisono.metrics.record import JsonLines

LAUNCH = "UNISONO_LAUNCH"
FILE, SUMMARY = "ledger.jsonl", "goodput.json"


def process_began() -> float:
    """Return when this process began, in seconds since the epoch: before its imports."""
    if sys.platform != "linux":
        return float(psutil.Process().create_time())
    # psutil adds to a time of boot that is kept in whole seconds
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def read_ledger(folder: Path) -> list[Line]:
    """Return the lines in the order of time; what a power cut has left of a line is passed over."""
    lines = []
    with suppress(FileNotFoundError):
        for text in (folder / FILE).read_bytes().splitlines():
            with suppress(orjson.JSONDecodeError):
                lines.append(orjson.loads(text))
    return sorted(lines, key=lambda line: float(line["time"]))


def summarise(folder: Path) -> Account:
    """Add the ledger up, and write the sums into the run folder."""
    summary = account(read_ledger(folder))
    replace_file(folder / SUMMARY, orjson.dumps(summary.as_dict(), option=orjson.OPT_INDENT_2) + b"\n")
    return summary


def _append(folder: Path, lines: Sequence[Line]) -> None:
    handle = os.open(folder / FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(handle).st_size
        is_torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"  # a power cut
        data = b"\n" * is_torn + b"".join(orjson.dumps(line) + b"\n" for line in lines)
        if os.write(handle, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / FILE))
    finally:
        os.close(handle)


class RankLedger:
    """Rank 0's side, which holds the run folder. Without a launcher it writes the launcher's lines too."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_alone = LAUNCH not in os.environ
        told = _alone() if self._is_alone else orjson.loads(os.environ[LAUNCH])
        self._launch = told["launch"]
        _append(folder, told["lines"])
        self._file = JsonLines(folder / FILE)  # stays open: there is a line for each update

    def note(self, kind: str, **values: object) -> None:
        """Write a line."""
        self._file.write({"time": time.time(), "launch": self._launch, "kind": kind, **values})

    def past(self) -> tuple[float, int]:
        """Return for how many seconds the run has been running, in all its launches, and its faults until now."""
        lines = read_ledger(self._folder)
        return running_seconds(lines, time.time()), sum(line["kind"] == "fault" for line in lines)

    def close(self) -> Iterator[str]:
        """Yield what to say at the end of the run; nothing where a launcher will."""
        if self._is_alone:
            self.note("end", code=0)
        self._file.close()
        if self._is_alone:
            yield from summarise(self._folder).sentences()


def _alone() -> dict[str, Any]:
    """Return what a launcher would have told: this process is its own."""
    began, launch = process_began(), uuid.uuid4().hex
    return {
        "launch": launch,
        "lines": [{"time": began, "launch": launch, "kind": kind} for kind in ("launch", "start")],
    }


class LaunchLedger:
    """The launcher's side. It keeps its lines until rank 0 has written one of this launch.

    Before that the run folder may not be there, or be another run's. Rank 0 gets them by ``for_ranks`` and writes them
    too, so that they are there if the launcher dies.
    """

    def __init__(self, folder: Path, *, began: float) -> None:
        self.launch = uuid.uuid4().hex
        self._folder = folder
        self._waiting: list[Line] = []
        self._line("launch", began)

    def note(self, kind: str, **values: object) -> None:
        """Write a line, now or as soon as the folder is known to be ours and there is room."""
        self._line(kind, time.time(), **values)
        with suppress(OSError):  # said at the close, if it is so still
            self._write()

    def for_ranks(self) -> str:
        """Return what rank 0 is to find in the environment as LAUNCH."""
        return orjson.dumps({"launch": self.launch, "lines": self._waiting}).decode()

    def _write(self) -> None:
        there = [line for line in read_ledger(self._folder) if line["launch"] == self.launch]
        if there:
            self._waiting = [line for line in self._waiting if line not in there]
            _append(self._folder, self._waiting)
            self._waiting = []

    def close(self, code: int) -> Iterator[str]:
        """Write the end and the sums; yield what to say. A disk that is full now must not hide the run's own end."""
        try:
            self._line("end", time.time(), code=code)
            self._write()
            if not self._waiting:
                yield from summarise(self._folder).sentences()
        except OSError as error:
            yield f"the ledger of its time cannot be written: {error.strerror} ({error.filename or self._folder})"

    def _line(self, kind: str, now: float, **values: object) -> None:
        self._waiting.append({"time": now, "launch": self.launch, "kind": kind, **values})
