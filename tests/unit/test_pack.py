"""How samples become micro-batches: nothing lost, nothing split, budgets held."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.pack import batch_by_count, batch_padded, pack

LENGTHS = st.lists(st.integers(1, 100), min_size=0, max_size=80)


@pytest.mark.parametrize("cut", [pack, batch_padded, batch_by_count])
@given(lengths=LENGTHS, budget=st.integers(1, 300))
def test_each_sample_is_there_once(
    cut: Callable[[np.ndarray, int], list[np.ndarray]], lengths: list[int], budget: int
) -> None:
    rows = cut(np.array(lengths, np.int64), budget)
    assert sorted(int(place) for row in rows for place in row) == list(range(len(lengths)))
    assert all(len(row) > 0 for row in rows)
    assert [row.tolist() for row in rows] == [row.tolist() for row in cut(np.array(lengths, np.int64), budget)]


@given(LENGTHS, st.integers(1, 300))
def test_a_packed_row_holds_its_budget(lengths: list[int], budget: int) -> None:
    tokens = np.array(lengths, np.int64)
    sums = [int(tokens[row].sum()) for row in pack(tokens, budget)]
    assert all(total <= budget or len(row) == 1 for total, row in zip(sums, pack(tokens, budget)))
    fitting = tokens[tokens <= budget]
    num_rows = len(sums) - int((tokens > budget).sum())
    assert num_rows <= 2 * -(-int(fitting.sum()) // budget), "first fit is never worse than twice the least"


@given(LENGTHS, st.integers(1, 300))
def test_a_padded_batch_holds_its_budget_with_its_padding(lengths: list[int], budget: int) -> None:
    tokens = np.array(lengths, np.int64)
    for batch in batch_padded(tokens, budget):
        assert len(batch) * int(tokens[batch].max()) <= budget or len(batch) == 1


@given(LENGTHS, st.integers(1, 9))
def test_batches_by_count_are_full_but_the_last(lengths: list[int], size: int) -> None:
    sizes = [len(batch) for batch in batch_by_count(np.array(lengths, np.int64), size)]
    assert all(count == size for count in sizes[:-1]) and all(count <= size for count in sizes)


@given(LENGTHS, st.integers(1, 300))
def test_packing_is_about_as_good_as_first_fit(lengths: list[int], budget: int) -> None:
    """At most 11/9 of the least possible and one more; first fit's rows stand in for the least."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        found = next((k for k, room in enumerate(rooms) if room >= length), None)
        if found is None:
            rooms.append(budget - length)
        else:
            rooms[found] -= length
    assert len(pack(np.array(lengths, np.int64), budget)) <= 11 / 9 * len(rooms) + 1


def test_packing_many_leaves_little_free() -> None:
    lengths = np.random.default_rng(0).integers(1, 1500, 100_000)
    assert len(pack(lengths, 8192)) <= 1.001 * lengths.sum() / 8192 + 1


def test_packing_fills_rows() -> None:
    """Gaps are filled by what fits, the longest first."""
    rows = pack(np.array([60, 50, 40, 50]), 100)
    assert sorted(sorted(row.tolist()) for row in rows) == [[0, 2], [1, 3]]
