"""Whole runs of `unisono.train` in forked ranks: data, run file, a kill at a given update, what is left behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.ranks import RankFailed, run_ranks

NOBODY = -1
OF_THE_CLOCK = {"seconds", "tokens_per_second", "seconds_by_cause", "seconds_by_rank"}


def make_data(folder: Path, num_samples: int = 20, *, seed: int = 0) -> Path:
    """Write conversations of uneven lengths as data.jsonl."""
    generator = random.Random(seed)
    file = folder / "data.jsonl"
    with file.open("w", encoding="utf-8") as out:
        for number in range(num_samples):
            question = f"{number}: say {'no ' * generator.randrange(1, 6)}"
            answer = "yes " * generator.randrange(1, 8)
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            out.write(json.dumps({"messages": turns}) + "\n")
    return file


def make_run(folder: Path, base: Path, *, num_samples: int = 20, name: str = "run", **sections: Any) -> Path:
    """Write a run file of 2 samples an update beside its data; ``sections`` are merged over the defaults.

    The output folder is ``folder/name``, the run file ``folder/name.yaml``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    values: dict[str, dict[str, Any]] = {
        "run": {"output_dir": str(folder / name)},
        "model": {"path": str(base)},
        "data": {"train": [str(make_data(folder, num_samples))], "cache_dir": str(folder / "cache")},
        "batch": {"global_size": 2},
        "optim": {"lr": 1e-2, "warmup": 0},
        "length": {"updates": 6},
        "precision": {"compute": "fp32"},
        "checkpoint": {"every": 2},
        "log": {"samples": True},
        "launch": {"timeout_seconds": 30},
    }
    for section, keys in sections.items():
        values[section] = {**values.get(section, {}), **keys}
    if "epochs" in values["length"]:
        values["length"].pop("updates")
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(values, indent=1), encoding="utf-8")  # JSON is YAML
    return file


def run_training(
    rank: int, world: int, run_file: Path, overrides: tuple[str, ...] = (), die_after: int | None = None
) -> str:
    """Train on this rank by the code of `unisono.train`; returns what it printed.

    ``die_after``: the whole world is killed, by SIGKILL, when this update is in metrics.jsonl; what is to be saved by
    then is on disk.
    """
    from unisono import train
    from unisono.journal import Journal
    from unisono.saving import Saver

    if die_after is not None:
        update, save = Journal.update, Saver.save

        def update_and_die(*args: Any) -> None:
            update(*args)
            if args[1].number == die_after:
                os.kill(os.getpid(), signal.SIGKILL)

        def save_and_wait(*args: Any, wait: bool) -> None:
            save(*args, wait=True)

        Journal.update = update_and_die  # type: ignore[method-assign]
        Saver.save = save_and_wait  # type: ignore[method-assign]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        train.start([str(run_file), *overrides])
    return said.getvalue()


def train_whole(world: int, run_file: Path, *overrides: str) -> str:
    """Run to the end; returns what rank 0 said."""
    said: str = run_ranks(run_training, world, run_file, overrides)[0]
    return said


def train_until_killed(world: int, run_file: Path, update: int, *overrides: str) -> None:
    """Run until SIGKILL after ``update``."""
    with pytest.raises(RankFailed, match="died"):
        run_ranks(run_training, world, run_file, overrides, update)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def updates_of(run: Path) -> list[dict[str, Any]]:
    """Return the metrics lines of updates; lines of another kind are left out."""
    return [line for line in read_lines(run / "metrics.jsonl") if "kind" not in line]


def numbers_of(run: Path) -> list[dict[str, Any]]:
    """Return all of metrics.jsonl that is not a time; summary (of a session) and verdict are about times."""
    lines = [line for line in read_lines(run / "metrics.jsonl") if line.get("kind") not in {"summary", "verdict"}]
    return [{key: value for key, value in line.items() if key not in OF_THE_CLOCK} for line in lines]


def ids_of(run: Path) -> dict[int, list[int]]:
    """Return the sample ids of every update; an update that stands there twice is an error."""
    lines = read_lines(run / "samples.jsonl")
    assert len({line["update"] for line in lines}) == len(lines), "an update stands twice in samples.jsonl"
    return {line["update"]: line["ids"] for line in lines}


def weights_of(run: Path) -> dict[str, np.ndarray]:
    """Return the tensors of the final model (or adapter)."""
    from safetensors.numpy import load_file

    (file,) = (run / "model").glob("*.safetensors")
    return load_file(file)


def assert_same_weights(ours: Path, other: Path) -> None:
    """Compare two final models bit by bit."""
    mine, theirs = weights_of(ours), weights_of(other)
    assert mine.keys() == theirs.keys() and mine
    for name, tensor in mine.items():
        assert tensor.tobytes() == theirs[name].tobytes(), f"{name} differs between {ours} and {other}"


def checkpoint_names(run: Path) -> list[str]:
    """Return everything that lies in the checkpoints folder, private leftovers too."""
    return sorted(path.name for path in (run / "checkpoints").iterdir())
