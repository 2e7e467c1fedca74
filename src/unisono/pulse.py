"""What a rank is doing right now, on a page that it shares with its launcher.

The page is a memory-mapped file: telling costs microseconds, no call of the system and no help of the other side, so
that it works while a rank hangs and after it was killed. The launcher's watch reads it. Without a launcher there is
nobody to tell, and no page.

Deadlines are learned: a phase may take ten times its longest time so far, and never less than the floor; one that is
entered for the first time (a first update compiles, a first save creates) may take ten times the floor.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson

FOLDER, FLOOR = "UNISONO_PULSE", "UNISONO_HANG_SECONDS"
STACKS_SIGNAL = signal.SIGRTMIN + 3 if sys.platform == "linux" else None  # nobody else has a use for it
PATIENCE = 10.0
# The phases of a rank, in the order in which it comes through them: before any update, between two, within one.
BEFORE = ("prepare", "group", "load", "resume", "rehearsal")
BETWEEN = ("validation", "generation", "checkpoint")
WITHIN = ("data", "forward", "backward", "exchange", "optimizer")
EXPORT = "export"
LEFT = "left"  # the last phase of a rank whose work is done
MAX_IDS = 64
_PAGE_BYTES = 4096
_HEAD = struct.Struct("<QQ")  # a number that is odd while the page is being written, and the bytes that follow


@dataclass
class Beat:
    """Where a rank is. Times are seconds of the machine's monotonic clock, which all processes share.

    ``done`` counts finished updates of the run; ``update`` is the one in work, ``records`` its sample ids (the first
    ones, if there are many); ``beside`` is what the thread that builds batches does.
    """

    phase: str = "start"
    since: float = 0.0
    deadline: float = 0.0
    done: int = 0
    update: int = 0
    records: list[int] = field(default_factory=list)
    beside: str = ""


class Pulse:
    """Tells where this rank is."""

    def __init__(self, page: mmap.mmap | None = None, floor_seconds: float = 3600.0) -> None:
        self._floor_seconds = floor_seconds
        self._page = page
        self._lock = threading.Lock()  # batches are built by a thread of their own
        self._count = 0
        self._longest: dict[str, float] = {}
        now = time.monotonic()
        self._beat = Beat(since=now, deadline=now + PATIENCE * floor_seconds)

    def at(self, phase: str) -> None:
        """Enter a phase; the one before has ended."""
        now, beat = time.monotonic(), self._beat
        lasted = now - beat.since
        self._longest[beat.phase] = max(lasted, self._longest.get(beat.phase, 0.0))
        patience = self._floor_seconds * PATIENCE
        if phase in self._longest:
            patience = max(self._floor_seconds, PATIENCE * self._longest[phase])
        beat.phase, beat.since, beat.deadline = phase, now, now + patience
        self._write()

    def begin(self, update: int, records: Sequence[int]) -> None:
        """Tell which update is in work, and of which samples."""
        self._beat.update, self._beat.records = update, list(records[:MAX_IDS])
        self._write()

    def finished(self, update: int) -> None:
        """Tell that ``update`` updates of the run are finished."""
        self._beat.done = update
        self._write()

    def beside(self, phase: str) -> None:
        """Tell what the thread that builds batches does."""
        self._beat.beside = phase
        self._write()

    def _write(self) -> None:
        if self._page is None:
            return
        with self._lock:
            data = orjson.dumps(asdict(self._beat))
            self._count += 2
            self._page[: _HEAD.size] = _HEAD.pack(self._count - 1, 0)
            self._page[_HEAD.size : _HEAD.size + len(data)] = data
            self._page[: _HEAD.size] = _HEAD.pack(self._count, len(data))


def page_of(folder: Path, rank: int) -> Path:
    """Return the file of a rank's page."""
    return folder / f"pulse-rank{rank}"


def stacks_of(folder: Path, rank: int) -> Path:
    """Return the file into which a rank writes its stacks when it gets STACKS_SIGNAL."""
    return folder / f"stacks-rank{rank}"


def answer_with_stacks() -> None:
    """Write the stacks of all threads when the launcher asks; the interpreter does so even while a call hangs."""
    folder = os.environ.get(FOLDER)
    if folder is not None and STACKS_SIGNAL is not None:
        # stays open for the life of the process
        handle = os.open(stacks_of(Path(folder), _local_rank()), os.O_WRONLY | os.O_CREAT, 0o600)
        faulthandler.register(STACKS_SIGNAL, file=handle, all_threads=True)


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def open_pulse(kind: type[Pulse] = Pulse) -> Pulse:
    """Open this rank's page where its launcher asked for it; without a launcher there is none."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        return kind()
    file = page_of(Path(folder), _local_rank())
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(handle, _PAGE_BYTES)
        return kind(mmap.mmap(handle, _PAGE_BYTES), float(os.environ[FLOOR]))
    finally:
        os.close(handle)


def read_beat(file: Path) -> Beat | None:
    """Read a rank's page; None before it has written one, or while it is writing."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return None
    if len(data) < _HEAD.size:
        return None
    count, size = _HEAD.unpack_from(data)
    if count % 2 or not size:
        return None
    try:
        beat = Beat(**orjson.loads(data[_HEAD.size : _HEAD.size + size]))
    except (orjson.JSONDecodeError, TypeError):
        return None  # it was written while we read
    return beat if file.read_bytes()[: _HEAD.size] == data[: _HEAD.size] else None
