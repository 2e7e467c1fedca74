"""A polite request to stop: SIGTERM, SIGINT, SIGUSR1 or SIGHUP to this process, whoever sends it.

The first one is only noted: a rank looks at it between updates, agrees with the others, saves and leaves with
``AGAIN``. The next one leaves at once. Schedulers, agents and terminals often send one request several times, to the
group and to each process: what comes within a second of the first is the same request.
"""

from __future__ import annotations

import functools
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

AGAIN = 75  # EX_TEMPFAIL of sysexits.h: nothing is lost, start me again
REQUESTS = tuple(known for known in signal.Signals if known.name in {"SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"})
_SAME_REQUEST_SECONDS = 1.0
Answer = Callable[[signal.Signals], None]


def _leave(signum: signal.Signals) -> None:
    os._exit(128 + signum)


def _note_only(signum: signal.Signals) -> None:
    """Leave it to those who ask ``Notice.asked``."""


class Notice:
    """Whether this process was asked to stop. ``insisted`` answers the second request, by leaving at once."""

    def __init__(self, insisted: Answer = _leave) -> None:
        self.signum: signal.Signals | None = None
        self._answer: Answer = _note_only
        self._insisted = insisted
        self._since = 0.0

    @property
    def asked(self) -> bool:
        """True once a request has come."""
        return self.signum is not None

    def listen(self) -> None:
        """Take the signals over, but for those that are ignored (under nohup they must stay so)."""
        for signum in REQUESTS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, self._note)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals over while inside."""
        before = {signum: signal.getsignal(signum) for signum in REQUESTS}
        self.listen()
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    @contextmanager
    def answering(self, answer: Answer) -> Iterator[None]:
        """Let the first request call ``answer`` while inside."""
        before, self._answer = self._answer, answer
        try:
            yield
        finally:
            self._answer = before

    def _note(self, number: int, frame: FrameType | None) -> None:
        signum, now = signal.Signals(number), time.monotonic()
        if signum.name == "SIGHUP":
            _let_go_of_terminal()
        if self.signum is None:
            self.signum, self._since = signum, now
            self._answer(signum)
        elif now - self._since > _SAME_REQUEST_SECONDS:
            self._insisted(signum)


def interrupt(signum: signal.Signals) -> None:
    """Answer a request at once, for work that has nothing to save."""
    raise KeyboardInterrupt


@functools.cache
def notice() -> Notice:
    """Return this rank's notice: signals are of the process, and so is what notes them."""
    return Notice()


class StopRequest:
    """What a run asks between updates: has a signal come, or does somebody want it by a file named ``stop``?

    The file lies in the run folder. It counts for the run that sees it: honouring it removes it.
    """

    def __init__(self, output_dir: str) -> None:
        self._file = Path(output_dir) / "stop"

    def is_asked(self) -> bool:
        """Tell whether this rank was asked; ranks may be told at different moments, so they must agree."""
        return notice().asked or self._file.exists()

    def honour(self, update: int, say: Callable[[str], None]) -> None:
        """Say that the run has stopped as asked, and take the file away."""
        signum = notice().signum
        by = signum.name if signum is not None else f"the file {self._file}" if self._file.exists() else "a signal"
        self._file.unlink(missing_ok=True)
        left = f"update {update} is saved" if update else "no update was done"
        say(f"stopped by {by}: {left}; the same command goes on from there")


def _let_go_of_terminal() -> None:
    """Write to nowhere from now on where a terminal was, which has gone: writing to it would be an error."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for handle in (1, 2):
        if stat.S_ISCHR(os.fstat(handle).st_mode):
            os.dup2(nowhere, handle)
    os.close(nowhere)
