"""SIGKILL at any moment, again and again, against a run that nothing happens to: not one number differs."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from support.ranks import run_ranks
from support.runs import OF_THE_CLOCK, assert_same_weights, ids_of, make_run, run_training, train_whole, updates_of

NUM_KILLS = 200


def kill_again_and_again(rank: int, world: int, file: Path, folder: Path, seed: int, num_kills: int) -> list[float]:
    """Do run after run to its end in ``folder``; kill each at random moments until ``num_kills`` have been met.

    Returns the moments (seconds after a start) at which a run was killed.
    """
    generator = random.Random(seed)
    moments: list[float] = []
    number, longest = 0, 0.5
    while len(moments) < num_kills:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run_training(rank, world, file, (f"run.output_dir={folder}/{number}",))
                code = 0
            finally:
                os._exit(code)
        begin, patience = time.monotonic(), generator.uniform(0, longest)
        ended = 0
        while not ended and time.monotonic() - begin < patience:
            ended, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.002)
        if ended:
            assert status == 0, f"seed {seed}: run {number} failed"
            longest = time.monotonic() - begin
            number += 1
            continue
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        moments.append(patience)
    run_training(rank, world, file, (f"run.output_dir={folder}/{number}",))
    return moments


def compare(folder: Path, whole: Path) -> None:
    """Line by line: ids, losses, rates, norms; and the weights, bit by bit."""
    mine, theirs = (
        [{k: v for k, v in line.items() if k not in OF_THE_CLOCK} for line in updates_of(run)]
        for run in (folder, whole)
    )
    assert mine == theirs and len(mine) == 30, folder.name
    assert ids_of(folder) == ids_of(whole)
    assert_same_weights(folder, whole)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_kills", [12, pytest.param(NUM_KILLS, marks=pytest.mark.faults)])
def test_b30_random_kills_change_nothing(tiny: Path, tmp_path: Path, num_kills: int) -> None:
    seed = int(os.environ.get("UNISONO_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
    print(f"UNISONO_SEED={seed}")
    adapter = {"rank": 4, "dropout": 0.2}  # what is random in an update must be the same after a kill
    file = make_run(
        tmp_path,
        tiny,
        model={"lora": adapter},
        length={"updates": 30},
        checkpoint={"every": 3},
        validate={"every": 7},
        data={"validation": 0.2},
    )
    train_whole(1, file, f"run.output_dir={tmp_path}/whole")
    (moments,) = run_ranks(kill_again_and_again, 1, file, tmp_path / "hit", seed, num_kills)
    runs = sorted((tmp_path / "hit").iterdir())
    print(f"{len(moments)} kills in {len(runs)} runs")
    for run in runs:
        compare(run, tmp_path / "whole")
