"""``unisono.train`` with a known mistake: WRONG names it; the drill's faults come as always."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from unisono import resume, train
from unisono.drill.faults import PLANTED
from unisono.drill.worker import open_saboteur
from unisono.pulse import open_pulse
from unisono.state import seed_update
from unisono.step import take_update
from unisono.strategy.ddp import apply
from unisono.worker import run_worker

count = iter(range(1, 10**6))


def seed_by_start(seed: int, update: int, rank: int) -> None:
    """Seed by the updates since the start of the process."""
    seed_update(seed, next(count), rank)


def mean_of_means(*args: Any, num_targets: int, world: Any, **kwargs: Any) -> Any:
    """Divide by the targets of this rank, and by the ranks."""
    own = sum(len(batch.target_ids) for batch in args[1])
    return take_update(*args, num_targets=own * world.size, world=world, **kwargs)


def no_sum(_, bucket):  # type: ignore[no-untyped-def]
    """Exchange nothing."""
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    dist.barrier()
    return future


def first_samples_again(self: Any, position: Any) -> Any:
    """Begin with the samples of update 1 at each start."""
    right = updates_from(self, position)
    first = int(os.environ.get("RESUMED", "0"))
    return lambda number: replace(right(number - first), number=number)


def restored(run: Any, folder: Any) -> Any:
    """Remember where this start goes on."""
    state = restore_run(run, folder)
    os.environ["RESUMED"] = str(state.update)
    return state


def forgotten(optimizer: Any, *_: Any) -> None:
    """Restore no moments."""


updates_from, restore_run = train.Run.updates_from, train.restore_run
if os.environ["WRONG"] == "reseeds by the start":
    train.seed_update = seed_by_start
elif os.environ["WRONG"] == "begins the order anew":
    train.Run.updates_from = first_samples_again
    train.restore_run = restored
elif os.environ["WRONG"] == "forgets the moments":
    resume.restore_state = forgotten
elif os.environ["WRONG"] == "mean of means":
    train.take_update = mean_of_means
elif os.environ["WRONG"] == "exchanges nothing":
    apply._sum = no_sum
else:
    assert os.environ["WRONG"] == "nothing"

if __name__ == "__main__":
    run_worker(lambda: train.start(sys.argv[1:], open_saboteur if os.environ.get(PLANTED) else open_pulse))
