"""Load a checkpoint into tensors that already exist, whatever number of ranks wrote it."""

from __future__ import annotations

import warnings
from collections.abc import Set
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from unisono.dist import World
from unisono.errors import CheckpointError


def stored_tensors(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the tensors in a checkpoint by name: their whole shapes, and their formats.

    DCP's index is a pickle: call this only on a folder whose hashes were verified.
    """
    found = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {name: each for name, each in found.items() if isinstance(each, TensorStorageMetadata)}
    return {name: (each.size, each.properties.dtype) for name, each in tensors.items()}


def check_names(stored: Set[str], needed: Set[str], *, where: Path) -> None:
    """Raise CheckpointError unless the stored tensors are exactly the needed ones."""
    missing, unknown = sorted(needed - stored), sorted(stored - needed)
    if missing or unknown:
        raise CheckpointError(
            f"it does not fit this model: it lacks {_few(missing)}; it has besides {_few(unknown)}",
            where=str(where),
        )


def load_checkpoint(folder: Path, tensors: dict[str, torch.Tensor], *, world: World) -> None:
    """Collective. Fill ``tensors`` in place; each of them must have been stored, and a rank need not ask for all."""
    check_names(stored_tensors(folder).keys() & tensors.keys(), tensors.keys(), where=folder)
    with warnings.catch_warnings():
        # one process on purpose: torch need not say that it has no process group
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(tensors, storage_reader=FileSystemReader(folder), no_dist=world.size == 1)


def _few(names: list[str]) -> str:
    return "nothing" if not names else ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
