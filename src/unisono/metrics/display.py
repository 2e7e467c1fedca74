"""What a person sees while it trains: a bar on a terminal, plain lines in a log file."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

BUSY_SECONDS = 30.0


class Display:
    """Shows progress on rank 0; silent on the others."""

    def __init__(self, *, first: int, total: int, every: int, speaks: bool) -> None:
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._speaks = speaks
        self._every = every
        self._total = total
        self._begin = self._spoke = time.monotonic()
        self._first = first
        self._bar: Progress | None = None
        if speaks and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("update"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.fields[text]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._bar.start()
            self._task = self._bar.add_task("update", total=total, completed=first - 1, text="")

    def say(self, text: str) -> None:
        """Print a line (above the bar, if there is one)."""
        if self._speaks:
            self._spoke = time.monotonic()
            self._console.print(text, markup=False)

    def busy(self, text: str) -> None:
        """Show what is going on between updates: beside the bar, and in a log file once in a while."""
        if self._bar is not None:
            self._bar.update(self._task, text=text)
        elif time.monotonic() - self._spoke >= BUSY_SECONDS:
            self.say(text)

    def update(self, number: int, *, loss: float, tokens_per_second: float, rate: float, grad_norm: float) -> None:
        """Show a finished update."""
        text = f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=number, text=text)
        elif number % self._every == 0 or number == self._total:
            left = (time.monotonic() - self._begin) / (number - self._first + 1) * (self._total - number)
            self.say(f"update {number}/{self._total}  {text}  lr {rate:.3g}  norm {grad_norm:.3f}  left {_clock(left)}")

    def close(self) -> None:
        """Take the bar down."""
        if self._bar is not None:
            self._bar.stop()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
