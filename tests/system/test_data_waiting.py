"""The loader never waits: batches are built while the model computes, also where every read of a sample is slow."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.ranks import run_ranks
from support.runs import make_run, read_lines, run_training
from support.updates import make_store
from unisono.data.loader import Batches, Cut, Loader, OrderedUpdates
from unisono.data.order import Order
from unisono.data.spread import CostModel
from unisono.metrics.record import Spans


class SlowStore:
    """A store whose every read takes 10 ms."""

    def __init__(self) -> None:
        self._store = make_store([(3, k) for k in range(1, 25)])
        self.lengths, self.num_targets, self.record = (
            self._store.lengths,
            self._store.num_targets,
            self._store.record,
        )

    def __len__(self) -> int:
        return len(self._store)

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        time.sleep(0.01)
        return self._store.sample(index)


def waiting(prefetch: int) -> Spans:
    """Take 24 updates of 4 slow reads, each of which computes for 60 ms."""
    store = SlowStore()
    order = Order([len(store)], global_size=4, global_tokens=None, seed=0)
    batches = Batches(store, Cut(True, 64), CostModel(1 / 384, 1.0), rank=0, world=1)
    spans = Spans()
    loader = iter(Loader(OrderedUpdates(order, batches), first=1, last=24, prefetch=prefetch))
    for _ in range(24):
        with spans.span("data"):
            next(loader)
        with spans.span("step"):
            time.sleep(0.06)
        spans.take_update()
    return spans


@pytest.mark.timeout(30)
def test_slow_reads_overlap_with_computing() -> None:
    """40 ms of reading would be 40 % of the time; built ahead it costs nothing but the first batch."""
    asked, ahead = waiting(0).session, waiting(2).session
    assert asked.data_wait_share > 0.3
    assert ahead.data_wait_share < 0.05
    assert ahead.first_wait_seconds > 0.03 and ahead.num_updates == 24


def train_slowly(rank: int, world: int, run_file: Path, read_seconds: float) -> str:
    """Train on this rank, with so many seconds added to each read of a sample."""
    from unisono.data.store import Store

    read = Store.sample

    def sample(self: Store, index: int) -> Any:
        time.sleep(read_seconds)
        return read(self, index)

    if read_seconds:
        Store.sample = sample  # type: ignore[method-assign]
    return run_training(rank, world, run_file)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("read_seconds", "most"), [(0.0, 0.01), (0.01, 0.03)], ids=["as it is", "10 ms a read"])
def test_the_starter_model_hardly_waits(tmp_path: Path, read_seconds: float, most: float) -> None:
    """Two processes, 8 samples an update, every weight trained."""
    from unisono.model.starter import starter_folder

    file = make_run(
        tmp_path,
        starter_folder(),
        num_samples=96,
        batch={"global_size": 8},
        length={"updates": 12},
        checkpoint={"every": 12, "keep": 1},
        optim={"lr": 1e-5},
        launch={"timeout_seconds": 300},
    )
    print(run_ranks(train_slowly, 2, file, read_seconds, limit=500)[0])
    (summary,) = [line for line in read_lines(tmp_path / "run/metrics.jsonl") if line.get("kind") == "summary"]
    print(summary)
    assert summary["num_updates"] == 12 and summary["data_wait_share"] < most
