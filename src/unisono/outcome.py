"""What ranks tell each other with an update, and what an update was."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

from unisono.dist import gather


@dataclass(frozen=True)
class Word:
    """What this rank tells the others with its loss: its wishes, and where its seconds went until then.

    ``compute_seconds`` are those of its own work, ``data_seconds`` it waited for its batch, and ``exposed_seconds`` lie
    after its last gradient was there: the exchange that nothing hid, and the wait for ranks that were slower.
    """

    save: bool = False
    stop: bool = False
    compute_seconds: float = 0.0
    data_seconds: float = 0.0
    exposed_seconds: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Word:
        """Read what ``values`` wrote."""
        save, stop, *seconds = values
        return cls(bool(save), bool(stop), *seconds)

    @classmethod
    def after(cls, exposed_seconds: float) -> Word:
        """Say no more than how long the exchange was waited for."""
        return cls(exposed_seconds=exposed_seconds)

    def values(self) -> list[float]:
        """Return it as numbers to be gathered."""
        return [float(value) for value in astuple(self)]

    @property
    def own_seconds(self) -> float:
        """What this rank took without the others."""
        return self.compute_seconds + self.data_seconds


@dataclass(frozen=True)
class UpdateResult:
    """What an update was.

    ``is_sound`` is false when loss or gradient norm is NaN or infinite on any rank (an overflow that fp16's loss scale
    answers is sound); ``bad_ranks`` had a loss that is not finite; ``stepped`` tells whether weights moved.
    ``words`` are all ranks': rank 0's wish to save counts, and any rank's wish to stop.
    """

    loss: float
    grad_norm: float
    stepped: bool
    is_sound: bool
    bad_ranks: list[int]
    words: list[Word]

    @property
    def save_wanted(self) -> bool:
        """Rank 0's wish."""
        return self.words[0].save

    @property
    def stop_wanted(self) -> bool:
        """Any rank's wish."""
        return any(word.stop for word in self.words)

    @property
    def own_seconds(self) -> list[float]:
        """What each rank took alone."""
        return [word.own_seconds for word in self.words]

    def idle(self, rank: int) -> dict[str, float]:
        """Tell apart what a rank's exposed seconds were: waiting for the slowest rank, and communication.

        The slowest rank came later by what it took longer. Empty where the strategy does not tell.
        """
        exposed = self.words[rank].exposed_seconds
        if not exposed:
            return {}
        waiting = min(exposed, max(self.own_seconds) - self.own_seconds[rank])
        return {"communication": exposed - waiting, "waiting": waiting}


def leave_out(word: Callable[[float], Word]) -> UpdateResult:
    """Collective. Take no step at all; the ranks still hear each other's wishes."""
    words = [Word.of(theirs) for theirs in gather(word(0.0).values())]
    return UpdateResult(loss=math.nan, grad_norm=math.nan, stepped=False, is_sound=True, bad_ranks=[], words=words)
