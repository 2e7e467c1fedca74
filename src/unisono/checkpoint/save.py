"""Write a checkpoint so that it is whole or not there at all, and purge old ones only after that.

Private folder -> sharded tensors by torch's DCP, synced -> manifest with sizes and hashes -> one rename -> purge.
"""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from collections.abc import Callable, Set
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from unisono.checkpoint.manifest import Manifest, candidates, seal
from unisono.dist import World, any_rank, deal
from unisono.durable import swap
from unisono.errors import CheckpointError

_HINT = "older checkpoints are as they were; make room if the disk is full, and start the run again"


def checkpoint_name(update: int) -> str:
    """Return the folder name of a checkpoint; names are for people, the manifest counts."""
    return f"update-{update:08d}"


def save_checkpoint(
    checkpoints: Path,
    tensors: dict[str, torch.Tensor],
    manifest: Manifest,
    *,
    world: World,
    keep: int,
    needed_bytes: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Collective. Save ``tensors`` as one checkpoint, then keep the newest ``keep`` and the best one.

    Tensors that several ranks give are written once. A failure on any rank leaves all older checkpoints as they were
    and raises on every rank. ``needed_bytes``: of all ranks together, if these tensors are this rank's share only;
    ``group``: what the ranks talk over, if not their first group.
    """
    target = checkpoints / checkpoint_name(manifest.update)
    private = checkpoints / f".{target.name}.tmp"
    needed = sum(tensor.nbytes for tensor in tensors.values()) if needed_bytes is None else needed_bytes

    def begin() -> None:
        checkpoints.mkdir(parents=True, exist_ok=True)
        check_room(checkpoints, needed, f"the checkpoint of update {manifest.update}")
        _fresh(private)

    _together(world.is_first, begin, f"cannot create {private}", group)
    writer = FileSystemWriter(private, single_file_per_rank=True, sync_files=True, thread_count=1)
    try:
        with warnings.catch_warnings():
            # one process on purpose: torch need not say that it has no process group
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            warnings.filterwarnings("ignore", message="TypedStorage is deprecated")  # torch 2.8 about itself
            save(tensors, storage_writer=writer, process_group=group, no_dist=world.size == 1)
    except (CheckpointException, OSError) as error:
        if world.is_first:
            shutil.rmtree(private, ignore_errors=True)
        raise CheckpointError(
            f"saving update {manifest.update} failed: {_reason(error)}",
            where=str(private),
            hint=_HINT,
        ) from error

    def publish() -> None:
        seal(private, manifest)
        swap(private, target)
        purge(checkpoints, keep, update=manifest.update)

    try:
        _together(world.is_first, publish, f"cannot publish {target}", group)
    finally:
        if world.is_first:
            shutil.rmtree(private, ignore_errors=True)  # it is there only if publishing failed
    return target


def share_of(
    tensors: dict[str, torch.Tensor], *, alone: Set[str] = frozenset(), rank: int, world: int
) -> dict[str, torch.Tensor]:
    """Return what this rank writes: what it holds ``alone``, its part of what is sharded, its share of all else.

    No communication: every rank deals out alike what all of them hold.
    """
    held = sorted(name for name, each in tensors.items() if not (isinstance(each, DTensor) or name in alone))
    writers = dict(zip(held, deal([tensors[name].nbytes for name in held], world)))
    return {name: tensor for name, tensor in tensors.items() if writers.get(name, rank) == rank}


def check_room(folder: Path, needed: int, what: str) -> None:
    """Raise OSError (ENOSPC) unless ``needed`` bytes are free where ``folder`` lies; says both numbers."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{what} needs {needed / 1e6:,.1f} MB, {free / 1e6:,.1f} MB are free", str(folder))


def _reason(error: CheckpointException | OSError) -> str:
    """Say what each rank met; torch's own words hold whole stacks of frames."""
    if isinstance(error, OSError):
        return str(error)
    return "; ".join(f"rank {rank}: {met!r}" for rank, (met, _) in sorted(error.failures.items()))


def _together(acts: bool, action: Callable[[], None], what: str, group: dist.ProcessGroup | None) -> None:
    """Collective. Let one rank act; if that fails, all ranks raise."""
    error: OSError | None = None
    if acts:
        try:
            action()
        except OSError as caught:
            error = caught
    if any_rank(error is not None, group):
        raise CheckpointError(f"{what}: {error or 'see rank 0'}", hint=_HINT) from error


def _fresh(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def purge(checkpoints: Path, keep: int, *, update: int) -> None:
    """Delete all but the newest ``keep`` and the one with the best validation loss.

    Only what this run saved, up to ``update``: not a person's copies under names of their own, nothing without a
    manifest, and later checkpoints (damaged ones that were passed over) neither count nor go.
    """
    ours = [
        (folder, m)
        for folder, m in candidates(checkpoints)
        if isinstance(m, Manifest) and folder.name == checkpoint_name(m.update) and m.update <= update
    ]
    validated = [(m.validation_loss, folder) for folder, m in ours if m.validation_loss is not None]
    best = {min(validated)[1]} if validated else set()
    for folder, _ in ours[keep:]:
        if folder not in best:
            doomed = folder.with_name(f".{folder.name}.old")
            os.rename(folder, doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(checkpoints: Path) -> list[str]:
    """Remove what a killed save or purge left behind; returns the names, to be said aloud."""
    leftovers = (
        [f for f in checkpoints.glob(".update-*") if f.suffix in {".tmp", ".old"}] if checkpoints.is_dir() else []
    )
    for folder in leftovers:
        shutil.rmtree(folder, ignore_errors=True)
    return [folder.name for folder in leftovers]
