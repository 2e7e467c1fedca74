"""How far the files have been read, said every few seconds; on a terminal as one line with a bar that grows."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta

PROGRESS_SECONDS = 2.0
_BAR_WIDTH = 24


class Progress:
    """Says the share that is done, the speed and the time that is left; silent for short work."""

    def __init__(self, sizes: list[int | None], say: Callable[[str], None]) -> None:
        known = [size or 0 for size in sizes]
        self._before = [sum(known[:i]) for i in range(len(known))]
        self._total = None if None in sizes else max(1, sum(known))
        self._is_line = say is print and sys.stdout.isatty()
        self._say = say
        self._began = self._spoke = time.monotonic()
        self._first: tuple[float, int] | None = None

    def at(self, file: int, num_bytes: int, num_records: int, *, skipped: int = 0) -> None:
        """Note that a file has been read up to a byte; ``skipped`` records were there from before."""
        now = time.monotonic()
        if num_records <= skipped:
            self._first = None
            self._began = now
        elif self._first is None:
            self._first = (now, self._before[file] + num_bytes)
        if now - self._spoke < PROGRESS_SECONDS:
            return
        self._spoke = now
        rate = max(0, num_records - skipped) / max(now - self._began, 1e-9)
        self._show(f"{self._share(file, num_bytes, now)}{num_records:,} records, {rate:,.0f} records/s")

    def done(self) -> None:
        """Leave the line on a terminal as it is."""
        if self._is_line and self._spoke > self._began:
            print()

    def _share(self, file: int, num_bytes: int, now: float) -> str:
        if self._total is None:
            return ""
        read = self._before[file] + num_bytes
        share = min(1.0, read / self._total)
        since, first = self._first or (now, read)
        left = (now - since) * (self._total - read) / (read - first) if read > first else None
        bar = f"{'█' * round(_BAR_WIDTH * share):░<{_BAR_WIDTH}} "
        eta = "" if left is None else f"{timedelta(seconds=round(left))} left, "
        return f"{bar if self._is_line else ''}{share:.0%}, {eta}"

    def _show(self, text: str) -> None:
        if self._is_line:
            print(f"\r\x1b[2Kpreparing data: {text}", end="", flush=True)
        else:
            self._say(f"preparing data: {text}")
