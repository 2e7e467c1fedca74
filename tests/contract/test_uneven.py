"""What is left over: the rest of an epoch (B04), fewer samples than ranks (B26), ranks with unequal work (B27)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.ranks import run_ranks
from support.updates import Settings, Trace, assert_same_step, assert_same_trace, make_store, train_updates
from unisono.data.loader import Batches, Cut
from unisono.data.spread import CostModel


def plain_steps(rank: int, world: int, folder: Path, settings: Settings, batches: list[list[int]]) -> Trace:
    """SGD1 in plain PyTorch over samples of equal shape: the model's own mean loss, a batch at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    store = make_store(settings.shapes)
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in batches:
        ids = torch.tensor(np.stack([store.ids[k] for k in batch]), dtype=torch.int64)
        is_target = torch.tensor(np.stack([store.masks[k] for k in batch]))
        loss = model(input_ids=ids, labels=ids.masked_fill(~is_target, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    parameters = {f"causal_lm.{name}": p.detach().numpy().copy() for name, p in model.named_parameters()}
    return Trace(losses, [], [], batches, parameters)


def test_b04_the_rest_of_an_epoch_is_stepped_with_its_own_divisor(tiny: Path) -> None:
    seven = Settings(shapes=[(3, 5)] * 7, global_size=4, micro_size=1, updates=4, shuffle=False)
    batches = [[0, 1, 2, 3], [4, 5, 6], [0, 1, 2, 3], [4, 5, 6]]
    (expected,) = run_ranks(plain_steps, 1, tiny, seven, batches)
    (ours,) = run_ranks(train_updates, 1, tiny, seven)[0]
    assert ours.ids == batches
    assert_same_step(ours, expected)
    assert_same_trace(ours, expected, tolerance=1e-5)  # several updates: the contract's bound, as for twenty
    three = Settings(shapes=[(3, 5)] * 3, global_size=4, micro_size=1, shuffle=False)
    (expected,) = run_ranks(plain_steps, 1, tiny, three, [[0, 1, 2]])
    assert_same_step(run_ranks(train_updates, 1, tiny, three)[0][0], expected)


@pytest.mark.parametrize(
    "settings",
    [
        Settings(shapes=[(3, 4)], global_size=1, updates=3),
        Settings(shapes=[(3, 4), (3, 7), (5, 2)], global_size=2, updates=4),
    ],
    ids=["1 sample", "3 samples, batch 2"],
)
def test_b26_fewer_samples_than_ranks(tiny: Path, settings: Settings) -> None:
    (expected,) = run_ranks(train_updates, 1, tiny, settings)[0]
    ranks = [traces[0] for traces in run_ranks(train_updates, 3, tiny, settings)]
    for trace in ranks:
        assert_same_step(trace, expected)
        assert_same_trace(trace, expected, tolerance=1e-5)  # several updates: the contract's bound, as for twenty
        assert trace.ids == expected.ids
    assert all((ranks[0].parameters[k] == ranks[2].parameters[k]).all() for k in ranks[0].parameters)


def test_b27_ranks_with_unequal_numbers_of_micro_batches(tiny: Path) -> None:
    """Five short samples weigh as much as three long ones: 5 micro-batches on a rank, 3 on the other."""
    long_and_short = [(4, 16)] * 3 + [(4, 3)] * 5
    store = make_store(long_and_short)
    counts = [
        len(
            Batches(store, Cut(True, 4096, 1), CostModel(1 / 384, 1.0), rank=rank, world=2)
            .build(1, 0, np.arange(8))
            .micro_batches
        )
        for rank in range(2)
    ]
    assert sorted(counts) == [3, 5]
    settings = Settings(shapes=long_and_short, global_size=8, micro_size=1, updates=3)
    (expected,) = run_ranks(train_updates, 1, tiny, settings)[0]
    first, second = (traces[0] for traces in run_ranks(train_updates, 2, tiny, settings))
    assert_same_step(first, expected)
    assert all(sorted(ids) == list(range(8)) for ids in first.ids)
    assert all((first.parameters[k] == second.parameters[k]).all() for k in first.parameters)
