"""Saving sharded state is collective: all ranks take the same steps, also when one of them cannot write (B41)."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from support.ranks import run_ranks
from support.runs import make_run, train_until_killed, train_whole

Saves = list[tuple[int, list[str]]]


def save_and_record(rank: int, world: int, file: Path, overrides: tuple[str, ...], fails: str) -> tuple[Saves, str]:
    """Train on this rank; returns the collectives of each save, by update, and the error if a save failed.

    ``fails``: ``data`` or ``publishing``: where rank 0 alone meets a full disk.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.utils._python_dispatch import TorchDispatchMode

    from unisono import saving, train
    from unisono.checkpoint import save
    from unisono.errors import CheckpointError

    saves: Saves = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "c10d" in str(func):
                saves[-1][1].append(str(func))
            return func(*args, **(kwargs or {}))

    def full_disk(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    def recorded(checkpoints: Path, tensors: Any, *, manifest: Any, **kwargs: Any) -> Path:
        saves.append((manifest.update, []))
        with Recorder():
            return write(checkpoints, tensors, manifest=manifest, **kwargs)

    write, saving.save_checkpoint = saving.save_checkpoint, recorded
    if rank == 0 and fails == "data":
        FileSystemWriter.write_data = full_disk  # type: ignore[method-assign]
    if rank == 0 and fails == "publishing":
        save.swap = full_disk
    try:
        train.start([str(file), *overrides])
    except CheckpointError as error:
        return saves, str(error)
    return saves, ""


def assert_same_saves(tmp_path: Path, tiny: Path, updates: list[int], *overrides: str, fails: str = "") -> list[str]:
    """Train on two ranks; both save after ``updates`` by the same collectives. Returns their errors."""
    file = make_run(tmp_path, tiny, length={"updates": 3}, strategy={"name": "fsdp2"})
    (first, *rest) = run_ranks(save_and_record, 2, file, overrides, fails)
    assert [update for update, _ in first[0]] == updates
    assert all(len(names) > 2 for _, names in first[0]), first[0]
    assert all(saves == first[0] for saves, _ in rest)
    return [error for _, error in (first, *rest)]


@pytest.mark.parametrize(
    "overrides",
    [(), ("optim.name=sgd", "optim.momentum=0"), ("checkpoint.mode=wait", "model.lora.rank=4")],
    ids=["adamw", "no state", "lora, waiting"],
)
def test_b41_all_ranks_save_by_the_same_collectives(tiny: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    assert assert_same_saves(tmp_path, tiny, [2, 3], *overrides) == ["", ""]


@pytest.mark.parametrize("fails", ["data", "publishing"])
def test_b41_a_rank_that_cannot_write_stops_all_of_them(tiny: Path, tmp_path: Path, fails: str) -> None:
    """Nobody waits for it, and the run goes on from what there was."""
    file = make_run(tmp_path, tiny, length={"updates": 3}, strategy={"name": "fsdp2"})
    train_until_killed(2, file, 3)
    errors = assert_same_saves(tmp_path, tiny, [3], fails=fails)
    assert "No space left on device" in errors[0] and all(errors)
    names = {path.name for path in (tmp_path / "run/checkpoints").iterdir()}
    assert names == {"update-00000002"}
    assert "resumed update-00000002" in train_whole(2, file)
