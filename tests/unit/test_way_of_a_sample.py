"""Order, spread and pack together: for any lengths, ranks, budgets and weights each sample is trained when due."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.order import Order
from unisono.data.pack import pack
from unisono.data.spread import CostModel, spread

COST = CostModel(1 / 384, 1.0)
SOURCES = st.lists(st.tuples(st.integers(1, 15), st.sampled_from([1, 2, 3])), min_size=1, max_size=3)
BATCHES = st.one_of(st.tuples(st.integers(1, 40), st.none()), st.tuples(st.none(), st.integers(1, 200)))


@settings(max_examples=60)
@given(SOURCES, BATCHES, st.integers(1, 8), st.integers(1, 80), st.integers(0, 2**63 - 1), st.data())
def test_each_sample_is_trained_as_often_as_due(
    sources: list[tuple[int, int]],
    batch: tuple[int | None, int | None],
    world: int,
    budget: int,
    seed: int,
    data: st.DataObject,
) -> None:
    sizes, weights = [size for size, _ in sources], [weight for _, weight in sources]
    total = sum(sizes)
    lengths = np.array(data.draw(st.lists(st.integers(1, 50), min_size=total, max_size=total)))

    def order() -> Order:
        size, tokens = batch
        return Order(sizes, weights=weights, lengths=lengths.take, global_size=size, global_tokens=tokens, seed=seed)

    walked = order()
    trained = Counter[int]()
    for number in range(1, walked.num_updates(1) + 1):
        samples = walked.update(number).samples
        assert order().update(number).samples.tolist() == samples.tolist(), "a resumed run asks for it first"
        for share in spread(COST(lengths[samples], lengths[samples] // 2), world):
            for row in pack(lengths[samples[share]], budget):
                ids = samples[share][row]
                trained.update(ids.tolist())
                assert lengths[ids].sum() <= budget or len(ids) == 1
    due = np.repeat(weights, sizes)
    assert trained == Counter({sample: int(due[sample]) for sample in range(total)})
