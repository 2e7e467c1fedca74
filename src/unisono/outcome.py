"""What ranks tell each other with an update, and what an update was."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from unisono.dist import gather


@dataclass(frozen=True)
class Word:
    """What this rank tells the others with its loss: its wishes, and the seconds that it worked without them."""

    save: bool = False
    stop: bool = False
    own_seconds: float = 0.0

    def values(self) -> list[float]:
        """Return it as numbers to be gathered."""
        return [float(self.save), float(self.stop), self.own_seconds]


@dataclass(frozen=True)
class UpdateResult:
    """What an update was.

    ``is_sound`` is false when loss or gradient norm is NaN or infinite on any rank (an overflow that fp16's loss scale
    answers is sound); ``bad_ranks`` had a loss that is not finite; ``stepped`` tells whether weights moved.
    ``words`` are all ranks' values: rank 0's wish to save counts, and any rank's wish to stop.
    """

    loss: float
    grad_norm: float
    stepped: bool
    is_sound: bool
    bad_ranks: list[int]
    words: list[list[float]]

    @property
    def save_wanted(self) -> bool:
        """Rank 0's wish."""
        return bool(self.words[0][0])

    @property
    def stop_wanted(self) -> bool:
        """Any rank's wish."""
        return any(stop for _, stop, _ in self.words)

    @property
    def own_seconds(self) -> list[float]:
        """What each rank worked alone."""
        return [seconds for _, _, seconds in self.words]


def leave_out(word: Callable[[], Word]) -> UpdateResult:
    """Collective. Take no step at all; the ranks still hear each other's wishes."""
    return UpdateResult(
        loss=math.nan, grad_norm=math.nan, stepped=False, is_sound=True, bad_ranks=[], words=gather(word().values())
    )
