"""Name a hang: which rank did not arrive, where, at what it is instead, and the stacks of all ranks.

The launcher reads what the ranks tell (see ``pulse``), so that no rank needs to be able to answer. A rank that waits
for others is excused while one of those that it waits for is within its own deadline; a slow rank is not a hang.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from unisono.launch.failure import HANG, Failure
from unisono.pulse import (
    BEFORE,
    BETWEEN,
    EXPORT,
    LEFT,
    PATIENCE,
    STACKS_SIGNAL,
    WITHIN,
    Beat,
    page_of,
    read_beat,
    stacks_of,
)

_OF_AN_UPDATE = ("other", *WITHIN)
# In the order in which a rank comes through them, between one finished update and the next.
_ORDER = (
    *("start", *BEFORE),
    *BETWEEN,
    *_OF_AN_UPDATE,
    *(EXPORT, LEFT),
)
# In these the ranks wait for each other.
_TOGETHER = {
    "group": "the meeting of the ranks",
    "load": "the loading of the model",
    "resume": "the choice of the checkpoint",
    "validation": "the validation",
    "generation": "the answers of the validation",
    "checkpoint": "the checkpoint",
    "backward": "the gradient exchange",
    "exchange": "the exchange of losses and norms",
    "export": "the final model",
}
_LOOK_SECONDS = 0.3
_STACKS_SECONDS = 2.0


@dataclass(frozen=True)
class Hang:
    """The ranks that did not arrive where the others wait; all ranks, if they are at the same place."""

    culprits: tuple[int, ...]


def judge(beats: Mapping[int, Beat], now: float) -> Hang | None:
    """Judge the ranks' last beats (times in seconds of the monotonic clock); None while there is hope."""
    alone = [rank for rank, beat in beats.items() if beat.phase not in _TOGETHER]
    place = {rank: (beat.done, _ORDER.index(beat.phase)) for rank, beat in beats.items() if beat.phase in _ORDER}
    furthest_back = min(place.values(), default=None)
    behind = alone or [rank for rank in beats if place.get(rank) == furthest_back]
    late = [rank for rank in behind if now > beats[rank].deadline]
    return Hang(tuple(behind if len(late) == len(behind) else late)) if late else None


def describe(hang: Hang, beats: Mapping[int, Beat], now: float) -> str:
    """Say in words who did not arrive where, and where every rank is."""
    waiting = [rank for rank in beats if rank not in hang.culprits]
    first = beats[hang.culprits[0]]
    silent = f"for {now - first.since:.0f} s"
    if waiting:
        awaited = beats[max(waiting, key=lambda rank: (beats[rank].done, _ORDER.index(beats[rank].phase)))]
        missed = f"did not arrive at {_TOGETHER.get(awaited.phase, awaited.phase)}{_of_update(awaited)}"
        who = " and ".join(f"rank {rank}" for rank in hang.culprits)
        said = f"hang: {who} {missed}; it is in {_place(first)} {silent}"
    elif len(beats) > 1:
        said = f"hang: all ranks are in {_TOGETHER.get(first.phase, first.phase)}{_of_update(first)} {silent}"
    else:
        said = f"hang: rank {hang.culprits[0]} is in {_place(first)} {silent}"
    if first.records:
        said += f"\nsamples of update {first.update}: {', '.join(map(str, first.records))}"
    lines = [
        f"rank {rank}: {_place(beat)} for {now - beat.since:.0f} s, {beat.done} updates done"
        for rank, beat in sorted(beats.items())
    ]
    return "\n".join([said, *lines])


def _of_update(beat: Beat) -> str:
    return f" of update {beat.done + 1}" if beat.phase in {"backward", "exchange"} else f" after update {beat.done}"


def _place(beat: Beat) -> str:
    if beat.phase == "data" and beat.beside:
        return beat.beside  # the thread that builds batches says more than the wait for it
    return f"{beat.phase} of update {beat.done + 1}" if beat.phase in _OF_AN_UPDATE else beat.phase


def left_early(ended: Sequence[int], beats: Mapping[int, Beat]) -> list[Failure]:
    """Return those of the ranks that ended with code 0 that were in the middle of their work.

    A library that calls ``os._exit(0)`` does it. The others, if any, fail because of them: these come first.
    """
    early = {rank: beats[rank].phase for rank in ended if rank in beats and beats[rank].phase != LEFT}
    return [
        Failure(rank, 1, 0.0, f"the rank left with exit code 0 before its work was done, in {phase}", plain=True)
        for rank, phase in early.items()
    ]


class Watch:
    """Watches the ranks of one attempt from a thread, and ends them where they would wait for ever.

    ``failures`` gives the verdict: a hang, or a rank that left too early.
    """

    def __init__(self, folder: Path, floor_seconds: float) -> None:
        self._folder = folder
        self._floor_seconds = floor_seconds
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._account: Failure | None = None

    def begin(self, pids: Sequence[int], ended: Callable[[], Sequence[int]] = tuple) -> None:
        """Watch over these processes, in the order of their ranks; ``ended`` are those that ended with code 0."""
        self._thread = threading.Thread(target=self._look, args=[list(pids), ended], name="watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def failures(self, seen: Sequence[Failure]) -> list[Failure]:
        """Return the verdict in place of what its end looked like from outside, or what was seen."""
        return list(seen) if self._account is None else [self._account]

    def _look(self, pids: list[int], ended: Callable[[], Sequence[int]]) -> None:
        now = time.monotonic()
        last = {rank: Beat(since=now, deadline=now + PATIENCE * self._floor_seconds) for rank in range(len(pids))}
        while not self._ended.wait(_LOOK_SECONDS):
            gone = ended()  # first: what they told last is read after it
            told = {rank: beat for rank in last if (beat := read_beat(page_of(self._folder, rank))) is not None}
            if early := left_early(gone, told):
                self._account = early[0]
                signal_all(pids, signal.SIGKILL)
                return
            last |= told
            now = time.monotonic()
            hang = judge(last, now)
            if hang is not None:
                said = describe(hang, last, now)
                stacks = self._stacks(pids, hang)
                self._account = Failure(hang.culprits[0], HANG, time.time(), f"{said}\n{stacks}", plain=True)
                signal_all(pids, signal.SIGKILL)
                return

    def _stacks(self, pids: Sequence[int], hang: Hang) -> str:
        """Let every rank write its stacks (its interpreter does so wherever it is); the culprit's come last."""
        if STACKS_SIGNAL is None:
            return "(no stacks: this system has no signal to spare)"
        signal_all(pids, STACKS_SIGNAL)
        files = {rank: stacks_of(self._folder, rank) for rank in range(len(pids))}
        end = time.monotonic() + _STACKS_SECONDS
        while time.monotonic() < end and not all(f.exists() and f.stat().st_size for f in files.values()):
            time.sleep(0.05)
        time.sleep(0.1)
        ranks = sorted(files, key=lambda rank: (rank in hang.culprits, rank == hang.culprits[0], rank))
        return "\n".join(f"stacks of rank {rank}:\n{_read(files[rank])}" for rank in ranks)


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace").rstrip() if file.exists() else "(none: it did not answer)"


def signal_all(pids: Sequence[int], signum: int) -> None:
    """Send a signal to those of the processes that are still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)
