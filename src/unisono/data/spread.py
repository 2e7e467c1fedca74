"""Which rank trains which sample of an update: balanced by cost, the same answer on every rank, no communication."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class CostModel:
    """Cost of a sample, in units of one token's way through the linear layers.

    ``cost = tokens + quadratic * tokens**2 + target * targets``. With width d, L layers and vocabulary V, the linear
    layers cost 12 d^2 L multiply-adds a token, causal attention (scores and values, half the square each) d L for every
    tokens^2, the output head d V a target. Hence quadratic = 1 / (12 d) and target = V / (12 d L)
    (Kaplan et al. 2020, "Scaling laws for neural language models", table 1).
    """

    quadratic: float
    target: float

    def __call__(self, lengths: Indices, num_targets: Indices) -> NDArray[np.float64]:
        """Return the cost of each sample."""
        tokens = lengths.astype(np.float64)
        return tokens + self.quadratic * tokens**2 + self.target * num_targets


def spread(costs: NDArray[np.float64], world: int) -> list[Indices]:
    """Give every sample to one rank: largest first, to the rank with the least so far.

    Returns, for each rank, the places (in ``range(len(costs))``) that it trains, ascending; a rank may have none.
    Longest-processing-time scheduling is within 4/3 of the best possible (Graham 1969) and far closer for many samples.
    """
    loads = [(0.0, 0, rank) for rank in range(world)]
    places: list[list[int]] = [[] for _ in range(world)]
    for place in np.argsort(-costs, kind="stable"):
        load, count, rank = heapq.heappop(loads)
        places[rank].append(int(place))
        heapq.heappush(loads, (load + float(costs[place]), count + 1, rank))
    return [np.sort(np.asarray(mine, np.int64)) for mine in places]
