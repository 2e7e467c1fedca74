"""Find equal samples by their hashes: by sorting, so that memory is a few times that of the hashes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unisono.data.scan import NUM_EXAMPLES, Hashes
from unisono.data.store import Ints

Pairs = list[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Distinct:
    """The different ones of some hashes.

    hashes: sorted, each once. first: where each stood first. num_copies: how many more there were. copies: the first
    few of those, each with the place of the first one that is equal.
    """

    hashes: Hashes
    first: Ints
    num_copies: int
    copies: Pairs

    def find(self, hashes: Hashes) -> Ints:
        """Return where each of some hashes stood first, -1 for those that are not here."""
        if len(self.hashes) == 0:
            return np.full(len(hashes), -1)
        places = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        return np.where(self.hashes[places] == hashes, self.first[places], -1)


def distinct(hashes: Hashes) -> Distinct:
    """Sort hashes and tell the different ones from the copies."""
    order = np.argsort(hashes, kind="stable")  # so the first of equal ones comes first
    ordered = hashes[order]
    is_new = np.ones(len(hashes), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    different = Distinct(ordered[is_new], order[is_new], int(np.count_nonzero(~is_new)), [])
    copies = np.sort(order[~is_new])[:NUM_EXAMPLES]
    return Distinct(
        different.hashes,
        different.first,
        different.num_copies,
        list(zip(copies.tolist(), different.find(hashes[copies]).tolist())),
    )


def conflicts(whole: Distinct, prompt: Hashes) -> tuple[int, Pairs]:
    """Count the samples whose prompt an earlier, different sample has; give the first few with that one."""
    first = np.sort(whole.first)
    first = first[prompt[first] != b""]
    prompts = distinct(prompt[first])
    return prompts.num_copies, [(int(first[copy]), int(first[original])) for copy, original in prompts.copies]
