"""Which rank failed first, and how that is told."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

USER_ERROR, NUMBERS_GONE, HANG = 2, 3, 4
FINAL = (USER_ERROR, NUMBERS_GONE)  # the same again, however often it is started
# what comes from outside or from native code, and leaves a rank no time for a word
_SUDDEN = {"SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE"}
_AT_ONCE_SECONDS = 2.0
PEER_LOST = signal.SIGUSR2 if sys.platform != "win32" else signal.SIGTERM  # what the agent ends the others with


@dataclass(frozen=True)
class Failure:
    """How one rank ended. ``text`` and the exact time are known if the rank could leave its error.

    ``retry``: the overrides that it asks to be started again with.
    """

    rank: int
    exit_code: int
    seen_seconds: float
    text: str | None = None
    plain: bool = False
    retry: tuple[str, ...] = ()

    @property
    def signal_name(self) -> str | None:
        """The signal that ended the rank, if one did."""
        names = {-int(known): known.name for known in signal.Signals}
        return names.get(self.exit_code, f"signal {-self.exit_code}") if self.exit_code < 0 else None


def first_failure(failures: Sequence[Failure]) -> Failure:
    """Return the cause: of the ranks that failed, the one that did not fail because of another.

    Ranks with an error have its exact time. A rank that died suddenly is seen up to a second and a poll later,
    while its peers report a lost connection within milliseconds: so sudden deaths near the first error go first.
    What the agent ended (PEER_LOST, and SIGKILL after its grace) goes last.
    """
    first_error = min((f.seen_seconds for f in failures if f.text is not None), default=float("inf"))

    def order(failure: Failure) -> tuple[int, float, int]:
        if failure.text is None and failure.signal_name in _SUDDEN:
            soon = failure.seen_seconds <= first_error + _AT_ONCE_SECONDS
            return 0 if soon else 2, failure.seen_seconds, failure.rank
        return 2 if failure.exit_code in (-PEER_LOST, -signal.SIGTERM) else 1, failure.seen_seconds, failure.rank

    return min(failures, key=order)


def tell(failures: Sequence[Failure], world: int, fate: str) -> str:
    """Write the failure of a launch: other ranks in a line each, then the first one with its whole text.

    ``fate`` says what follows: a restart, or none and why.
    """
    first = first_failure(failures)
    lines = [
        f"rank {other.rank} of {world} failed too: {_last_line(other)}"
        for other in sorted(failures, key=lambda failure: failure.rank)
        if other is not first and other.text is not None and other.text != first.text
    ]
    lines.append(f"rank {first.rank} of {world} failed ({_how(first)}); {fate}")
    return "\n".join(f"unisono: {line}" for line in lines) + "\n" + _words(first)


def _how(failure: Failure) -> str:
    return failure.signal_name or f"exit code {failure.exit_code}"


def _last_line(failure: Failure) -> str:
    text = (failure.text or "").strip()
    return text.splitlines()[0 if failure.plain else -1] if text else _how(failure)


def _words(failure: Failure) -> str:
    if failure.text is not None:
        text = failure.text.rstrip()
        return f"error: {text}" if failure.plain else text
    if failure.signal_name == "SIGKILL":
        return (
            "error: it was killed from outside (SIGKILL) and could leave no error\n"
            "  hint: out of memory is the usual reason: look at dmesg, or at the limits of the container or job"
        )
    if failure.signal_name is not None:
        return f"error: it was ended by {failure.signal_name}; what it said before is above"
    return f"error: it ended with exit code {failure.exit_code} and left no error; what it said before is above"
