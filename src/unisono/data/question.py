"""A validation sample as a question: the tokens before its last answer, and that answer, both as they are trained."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unisono.data.store import TokenStore

Ids = NDArray[np.int32]
_AT_A_TIME = 65_536  # samples whose number of targets is looked at; a store may hold a billion


@dataclass(frozen=True, eq=False)
class Question:
    """``prompt`` and ``expected``: int32 ``[tokens]``, at least one each; ``record`` is the sample's id."""

    record: int
    prompt: Ids
    expected: Ids


def first_questions(store: TokenStore, count: int) -> list[int]:
    """Return the places of the first ``count`` samples that have a target; fewer where there are fewer."""
    places: list[int] = []
    for start in range(0, len(store), _AT_A_TIME):
        samples = np.arange(start, min(start + _AT_A_TIME, len(store)))
        places += samples[store.num_targets[samples] > 0].tolist()
        if len(places) >= count:
            break
    return places[:count]


def question(store: TokenStore, place: int) -> Question:
    """Cut a sample at the start of its last run of targets; what follows that run is dropped."""
    ids, is_target = store.sample(place)
    starts = np.flatnonzero(is_target[1:] & ~is_target[:-1]) + 1  # the first token never is a target
    start, stop = int(starts[-1]), int(np.flatnonzero(is_target)[-1]) + 1
    return Question(int(store.record[np.array([place])][0]), ids[:start], ids[start:stop])
