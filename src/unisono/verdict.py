"""Say in words what held a run up, from the seconds that its updates recorded; no torch.

``judge`` is a pure function on the update lines of metrics.jsonl. It says nothing about what lies between updates
(saves, validation, restarts): that is the goodput's affair.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

LEAST_UPDATES = 10  # to judge by; the first one waits for its batch and warms everything up
MUCH = 0.05  # of the time
MUCH_DATA = 0.03
MUCH_ELSE = 0.15
SLOWER = 0.05  # than the others
MOST_BLOCKS = 200
LEAST_BLOCKS = 5  # on either side of a change
STANDARD_ERRORS = 5.0
Line = Mapping[str, Any]
Floats = npt.NDArray[np.float64]
_AMONG = ", with the exchange and the waiting for other ranks, which this strategy does not tell apart"
_ELSE = {
    "optimizer": "a larger batch.global_size makes fewer steps for the same samples",
    "exchange": "a larger batch.global_size makes fewer exchanges for the same samples",
    "other": "writing lines and lists of samples takes it: is the run folder on a slow disk?",
}


@dataclass(frozen=True)
class Setting:
    """What a verdict names besides seconds: an update's gradients (bytes), and the batches that are built ahead."""

    gradient_bytes: int
    prefetch: int


@dataclass(frozen=True)
class Finding:
    """What held the run up: ``kind``, the share of the time that it cost, and in words."""

    kind: str
    share: float
    words: str


@dataclass(frozen=True)
class Slowness:
    """A rank takes ``share`` more than the others, from the update at ``place`` on; None: all the time."""

    share: float
    place: int | None


def judge(lines: Sequence[Line], setting: Setting) -> list[Finding]:
    """Judge the update lines of a run, in order; the newest ones that had the same ranks count, if they took a step.

    The first finding weighs most. There is always one: that nothing stands out, or that there is too little to judge.
    """
    judged = _of_the_same_ranks(lines)[1:]
    if len(judged) < LEAST_UPDATES:
        return [Finding("too short", 0.0, f"too short to judge: {len(judged)} updates besides the first")]
    seconds = sum(line["seconds"] for line in judged)

    def share(cause: str) -> float:
        return float(sum(line["seconds_by_cause"].get(cause, 0.0) for line in judged) / seconds)

    compute, data = (np.array([line["seconds_by_rank"][what] for line in judged]) for what in ("compute", "data"))
    found = [
        *_communication(share("communication"), setting),
        *_data(float(data.max(axis=1).sum()) / seconds, setting),
        *_ranks(judged, compute, seconds),
        *(
            Finding(cause, share(cause), f"{share(cause):.0%} {cause}: {advice}")
            for cause, advice in _ELSE.items()
            if share(cause) >= MUCH_ELSE
        ),
    ]
    busy = share("forward") + share("backward")
    among = "" if compute.shape[1] == 1 or share("communication") else _AMONG
    nothing = Finding("nothing", busy, f"nothing stands out: {busy:.0%} of the time is forward and backward{among}")
    return sorted(found, key=lambda finding: -finding.share) or [nothing]


def _of_the_same_ranks(lines: Sequence[Line]) -> list[Line]:
    sizes = [len(line["seconds_by_rank"]["compute"]) for line in lines]
    begin = next((place for place in range(len(sizes), 0, -1) if sizes[place - 1] != sizes[-1]), 0)
    return [line for line in lines[begin:] if line["stepped"]]


def _communication(share: float, setting: Setting) -> Iterator[Finding]:
    if share >= MUCH:
        size = f"{setting.gradient_bytes / 1e6:,.0f} MB" if setting.gradient_bytes >= 1e6 else "less than 1 MB"
        advice = "a larger batch.global_size exchanges them less often, model.lora exchanges less"
        yield Finding(
            "communication",
            share,
            f"{share:.0%} exposed communication: {size} of gradients an update; {advice}, and a faster link hides more",
        )


def _data(share: float, setting: Setting) -> Iterator[Finding]:
    if share >= MUCH_DATA:
        yield Finding(
            "data",
            share,
            f"{share:.0%} waiting for data: raise data.prefetch (now {setting.prefetch}) if some batches are slow to "
            "build; put data.cache_dir on a faster disk if all are",
        )


def _ranks(lines: Sequence[Line], compute: Floats, seconds: float) -> Iterator[Finding]:
    """Name ranks that are slow, or say how much all wait for ever another one."""
    found = False
    for rank in range(compute.shape[1] if compute.shape[1] > 1 else 0):
        others = np.median(np.delete(compute, rank, axis=1), axis=1)
        slow = slowness(compute[:, rank] / np.maximum(others, 1e-9) - 1.0)
        if slow is not None:
            found = True
            since = "" if slow.place is None else f" since update {lines[slow.place]['update']}"
            name = "the other" if compute.shape[1] == 2 else "the others"
            cost = max(0.0, float((compute[:, rank] - others)[slow.place or 0 :].sum())) / seconds
            yield Finding(
                "slow rank",
                cost,
                f"rank {rank} is {slow.share:.0%} slower than {name}{since}: {cost:.0%} of the time is waiting for it; "
                "look at its cores, its GPU's clock and temperature, and what else runs there",
            )
    waited = float((compute.max(axis=1, keepdims=True) - compute).mean(axis=1).sum()) / seconds
    if waited >= MUCH and not found:
        yield Finding(
            "waiting",
            waited,
            f"{waited:.0%} waiting for the slowest rank, ever another one: samples are uneven, and a larger "
            "batch.global_size spreads them more evenly",
        )


def slowness(excess: Floats) -> Slowness | None:
    """Find the last state of a rank in ``excess``, by update: None unless it is slow, and certainly so.

    A long series is taken in blocks of an odd size, each for its median. Of all places where the series may change
    once, the one is taken that leaves least around the medians of the two sides. A median stands ``STANDARD_ERRORS``
    above what it is compared with: 1.25 sigma / sqrt(n), with sigma from the median deviation; so single updates weigh
    nothing.
    """
    size = -(-len(excess) // MOST_BLOCKS)
    size += 1 - size % 2  # the median of two is their mean, which one of them spoils
    blocks = np.array([np.median(excess[at : at + size]) for at in range(0, len(excess), size)])
    cut = _change(blocks)
    before, after = blocks[:cut], blocks[cut:]
    sigma = 1.4826 * float(np.median(np.abs(np.concatenate([part - np.median(part) for part in (before, after)]))))

    def error(part: Floats) -> float:
        return 1.25 * sigma / float(np.sqrt(len(part)))

    now, then, always = float(np.median(after)), float(np.median(before)), float(np.median(blocks))
    certain = STANDARD_ERRORS * error(after)
    if now >= max(SLOWER, certain) and now - then >= max(SLOWER, certain + STANDARD_ERRORS * error(before)):
        return Slowness(now, cut * size)
    if always >= max(SLOWER, STANDARD_ERRORS * error(blocks)) and now >= SLOWER:
        return Slowness(always, None)
    return None


def _change(blocks: Floats) -> int:
    """Return where the second of two states begins, if there are two."""

    def left(cut: int) -> float:
        return float(sum(np.abs(part - np.median(part)).sum() for part in (blocks[:cut], blocks[cut:])))

    least = min(LEAST_BLOCKS, len(blocks) // 2)
    return min(range(least, len(blocks) - least + 1), key=left)
