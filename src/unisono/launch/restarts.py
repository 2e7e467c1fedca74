"""Whether to start again after a failure, and with what: the budget, its refilling, and what no restart can mend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.launch.failure import FINAL, HANG, Failure, first_failure
from unisono.pulse import Beat

OUT_OF_MEMORY, POISON = 5, 6
SAME_UPDATE = 3  # failures of one update that are taken for its own fault
FAILURES_BEFORE_FEWER = 2  # without progress, where a range of ranks is allowed


@dataclass(frozen=True)
class Decision:
    """What follows a failure: ``again`` with ``overrides``, or the exit ``code``; ``fate`` says it in words."""

    again: bool
    code: int
    fate: str
    overrides: tuple[str, ...] = ()


class Restarts:
    """Decides after each failed attempt. The budget is refilled whenever the run has come further than ever before."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._used = 0
        self._furthest = 0
        self._failures: Counter[int] = Counter()  # by the update that was in work
        self.overrides: tuple[str, ...] = ()

    @property
    def ranks_fewer(self) -> int:
        """How many ranks fewer to try, where the run file leaves a choice."""
        return self._used // FAILURES_BEFORE_FEWER

    def decide(self, failures: Sequence[Failure], beats: Sequence[Beat]) -> Decision:
        """Judge an attempt by its failures and by what its ranks told last."""
        first = first_failure(failures)
        done = max((beat.done for beat in beats), default=0)
        in_work = max(beats, key=lambda beat: beat.update, default=Beat())
        if done > self._furthest:
            self._furthest, self._used = done, 0
        if first.exit_code in FINAL:
            return Decision(False, first.exit_code, "a restart cannot mend this")
        if first.exit_code == OUT_OF_MEMORY:
            return self._with_less(first)
        if in_work.update > done:
            self._failures[in_work.update] += 1
            if self._failures[in_work.update] >= SAME_UPDATE:
                return Decision(False, POISON, _poison(in_work))
        if self._used >= self._budget:
            code = HANG if first.exit_code == HANG else 1
            return Decision(False, code, f"the run has failed ({self._used} of {self._budget} restarts used)")
        self._used += 1
        return Decision(True, 1, f"starting again, restart {self._used} of {self._budget}", self.overrides)

    def _with_less(self, first: Failure) -> Decision:
        """Start again with what the rank asks for; it asks for less each time, so that this ends by itself."""
        if not first.retry:
            return Decision(False, OUT_OF_MEMORY, "a restart cannot mend this")
        self.overrides = first.retry
        return Decision(True, OUT_OF_MEMORY, f"starting again with {' '.join(first.retry)}", first.retry)


def _poison(beat: Beat) -> str:
    ids = ", ".join(map(str, beat.records))
    return (
        f"update {beat.update} has failed {SAME_UPDATE} times: its samples may be the cause: {ids}; "
        f"--skip-update {beat.update} leaves it out"
    )
