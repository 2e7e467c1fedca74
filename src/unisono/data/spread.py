"""Which rank trains which sample of an update: balanced by cost, the same answer on every rank, no communication."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

EVEN_ENOUGH = 1e-3  # of the mean: below it a step's time is not decided by the spread
MAX_EXCHANGES_PER_RANK = 4


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
    """Give every sample to one rank, so that the most loaded rank has little more than the mean.

    Returns, for each rank, the places (in ``range(len(costs))``) that it trains, ascending; a rank may have none, but
    not while another has two. First the largest goes to the rank with the least so far (longest-processing-time
    scheduling, within 4/3 of the best possible: Graham 1969), then samples of the most loaded rank are moved or
    exchanged as long as that makes it less loaded than it was.

    Costs are compared as integers, and which of several equal samples goes where is decided by their places: all ranks
    get the same answer, and the loads do not depend on the order of the samples.
    """
    falling = np.argsort(-costs, kind="stable")
    values = _integers(costs[falling])
    rank_of = _longest_first(values, world)
    if world > 1 and len(values):
        _exchange(values, rank_of, world)
    return [np.sort(falling[rank_of == rank]) for rank in range(world)]


def _integers(costs: NDArray[np.float64]) -> Indices:
    """Scale to integers, whose sums depend on no order; exact to 2**-40 of the largest, which comes first."""
    scale = 2.0**40 / float(costs[0]) if len(costs) and costs[0] > 0 else 1.0
    return np.rint(costs * scale).astype(np.int64)


def _longest_first(values: Indices, world: int) -> Indices:
    """Return the rank of each sample; ``values`` fall."""
    loads = [(0, 0, rank) for rank in range(world)]
    ranks: list[int] = []
    for value in values.tolist():
        load, count, rank = loads[0]
        ranks.append(rank)
        heapq.heapreplace(loads, (load + value, count + 1, rank))
    return np.asarray(ranks, np.int64)


def _exchange(values: Indices, rank_of: Indices, world: int) -> None:
    """Make the most loaded rank less loaded, again and again, by the best single move or exchange; changes ``rank_of``.

    Ends when none helps, when the loads are as even as one needs them, or after a fixed number of steps.
    """
    loads = np.zeros(world, np.int64)
    np.add.at(loads, rank_of, values)
    enough = max(int(values[0]), int(loads.sum() / world * (1 + EVEN_ENOUGH)))
    for _ in range(MAX_EXCHANGES_PER_RANK * world):
        most = int(loads.argmax())
        if loads[most] <= enough:
            return
        own = np.flatnonzero(rank_of == most)
        others = np.flatnonzero(rank_of != most)
        # what can come in return: a sample of another rank, or nothing of a rank
        value = np.concatenate([values[others], np.zeros(world, np.int64)])
        rank = np.concatenate([rank_of[others], np.arange(world)])
        given = values[own][:, None] - value
        larger = np.maximum(loads[most] - given, loads[rank] + given)
        larger[:, rank == most] = loads[most]
        best, back = divmod(int(larger.argmin()), len(rank))
        if larger[best, back] >= loads[most]:
            return
        other = int(rank[back])
        loads[[most, other]] += np.array([-1, 1]) * given[best, back]
        rank_of[own[best]] = other
        if back < len(others):
            rank_of[others[back]] = most
