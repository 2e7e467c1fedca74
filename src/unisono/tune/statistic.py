"""Is it faster, or is that the noise? Student's t on the logarithms of paired ratios; no torch.

The pairs are independent and lie in a changing order, so that a machine that grows slower harms both sides alike. Times
vary by factors, hence the logarithm, whose mean is the geometric mean of the ratios.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

NOISE = 0.05  # the chance that any setting is called different in a whole tuning in which none is
LEAST_PAIRS = 2
LEAST_GAIN = 1.01  # less is not worth a line in a run file


@dataclass(frozen=True)
class Ratio:
    """How many times as fast a setting is: the estimate, and the interval that holds the truth but for the noise."""

    low: float
    mean: float
    high: float

    @property
    def is_gain(self) -> bool:
        """True where all of the interval is above 1, and the estimate worth having."""
        return self.low > 1 and self.mean >= LEAST_GAIN

    def __str__(self) -> str:
        """Say it in three figures; an interval of very few pairs can be boundless."""
        return f"{self.mean:.3f} x ({self.low:.3f} to {self.high:.3f})"


def log_ratio(without: Sequence[float], within: Sequence[float]) -> float:
    """Compare two runs by the seconds of the same updates: log of how many times as fast the second is.

    The median of the updates: an update that something else disturbed weighs nothing.
    """
    return median(math.log(a / b) for a, b in zip(without, within, strict=True))


def judge(pairs: Sequence[float], settings: int) -> Ratio:
    """Return the ratio that log ratios of at least two pairs show, where ``settings`` are tried in all.

    The mean plus and minus t times the standard error (Student, "The probable error of a mean", Biometrika 6, 1908),
    with ``NOISE`` divided by the settings (Bonferroni), so that many trials do not find a gain by chance.
    """
    if len(pairs) < LEAST_PAIRS:
        raise ValueError(f"{len(pairs)} pairs say nothing about their noise: it takes {LEAST_PAIRS}")
    mean = fmean(pairs)
    reach = student(1 - NOISE / settings, len(pairs) - 1) * stdev(pairs) / math.sqrt(len(pairs))
    return Ratio(*(math.exp(min(value, 700.0)) for value in (mean - reach, mean, mean + reach)))


def is_hopeless(pairs: Sequence[float]) -> bool:
    """Tell whether to stop early: what has not gained by now will hardly come out of the noise.

    It can only keep a setting from being chosen, so the chance of choosing one by the noise stays below ``NOISE``.
    """
    return len(pairs) >= LEAST_PAIRS and fmean(pairs) <= 0


def student(share: float, freedom: int) -> float:
    """Return the t within which the ``share`` of Student's distribution lies, on both sides of 0."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):  # halves the interval of the angle down to the last bit
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < share else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """Return the share within t = sqrt(freedom) tan(angle) (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    if freedom % 2:
        term, total = cosine, 0.0
        for k in range(3, freedom + 1, 2):
            total += term
            term *= (k - 1) / k * cosine**2
        return 2 / math.pi * (angle + sine * total)
    term, total = 1.0, 0.0
    for k in range(2, freedom + 1, 2):
        total += term
        term *= (k - 1) / k * cosine**2
    return sine * total
