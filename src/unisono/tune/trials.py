"""The trials: pairs of runs in a changing order, one setting after another, each beside the best so far.

What a run is stays open here: ``Measure`` gives its seconds, or says why there are none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from unisono.errors import UnisonoError
from unisono.tune.candidates import Setting
from unisono.tune.statistic import LEAST_PAIRS, Ratio, is_hopeless, judge, log_ratio


class DoesNotRun(UnisonoError):
    """A trial has failed; the message says how."""


TIME_IS_UP = "time is up"
Seconds = Sequence[float]  # of the updates that count, the same ones in every run
Measure = Callable[[Mapping[str, object]], Seconds]  # raises DoesNotRun


@dataclass
class Evidence:
    """What the trials of a setting have shown; ``problem`` says why there are no more of them."""

    setting: Setting
    without: list[Seconds] = field(default_factory=list)
    within: list[Seconds] = field(default_factory=list)
    ratio: Ratio | None = None
    kept: bool = False
    problem: str | None = None

    @property
    def pairs(self) -> list[float]:
        """The log ratios of the pairs so far: above 0, the setting is faster."""
        return [log_ratio(*pair) for pair in zip(self.without, self.within)]

    def __str__(self) -> str:
        """Say it in a line."""
        if self.ratio is None or self.problem is not None:
            return self.problem or "not tried"
        pairs = f"{len(self.pairs)} pairs"
        if self.ratio.mean <= 1:
            return f"{self.ratio.mean:.3f} x, {pairs}: not faster"
        why = "kept" if self.kept else "too little to keep" if self.ratio.low > 1 else "within the noise"
        return f"{self.ratio}, {pairs}: {why}"


class Budget:
    """The time there is, and what a pair has taken so far."""

    def __init__(self, seconds: float, pair_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self.pair_seconds = pair_seconds

    def has_room(self) -> bool:
        """Tell whether another pair will end in time."""
        return self._clock() + self.pair_seconds <= self._end

    def spent(self, since: float) -> None:
        """Learn from a pair that began at ``since``."""
        self.pair_seconds = max(self.pair_seconds, self.now() - since)

    def minutes_left(self) -> float:
        """Return what is left of the time."""
        return max(0.0, self._end - self._clock()) / 60

    def now(self) -> float:
        """Return the clock's seconds."""
        return self._clock()


def climb(
    settings: Sequence[Setting], measure: Measure, budget: Budget, most_pairs: int, say: Callable[[str], None]
) -> list[Evidence]:
    """Try the settings in turn, each on top of those that were kept; returns the evidence for every one.

    Raises DoesNotRun if what was kept so far fails by itself.
    """
    kept: dict[str, object] = {}
    found = []
    for place, setting in enumerate(settings, 1):
        evidence = Evidence(setting)
        _compare(evidence, kept, measure, budget, most_pairs)
        if len(evidence.within) >= LEAST_PAIRS:
            evidence.ratio = judge(evidence.pairs, len(settings))
            evidence.kept = evidence.problem is None and evidence.ratio.is_gain
        kept |= setting.changes if evidence.kept else {}
        left = f"{budget.minutes_left():.0f} minutes left"
        say(f"  {place} of {len(settings)}  {setting.name}: {evidence}; {left}")
        found.append(evidence)
    return found


def _compare(evidence: Evidence, kept: Mapping[str, object], measure: Measure, budget: Budget, most_pairs: int) -> None:
    """Run pairs until there are enough, nothing is to be hoped for, it fails, or time is up."""
    with_it = {**kept, **evidence.setting.changes}
    while len(evidence.within) < most_pairs and not is_hopeless(evidence.pairs):
        if not budget.has_room():
            evidence.problem = TIME_IS_UP if len(evidence.within) < LEAST_PAIRS else None
            return
        since = budget.now()
        in_turn = [(evidence.without, kept), (evidence.within, with_it)]
        for runs, settings in in_turn if len(evidence.within) % 2 == 0 else reversed(in_turn):
            try:
                runs.append(measure(settings))
            except DoesNotRun as failure:
                if runs is evidence.without:
                    raise
                evidence.problem = f"does not run: {failure.message}"
                return
        budget.spent(since)
