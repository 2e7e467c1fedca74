"""Write a folder so that it is whole or not there: a private folder beside it, flushed, then one rename."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unisono.durable import sync, sync_folder
from unisono.errors import OutputError


def check_target(out: Path, source: Path) -> None:
    """Refuse a target that holds something, is not a folder, or lies within what is to be written there."""
    if out.is_dir() and any(out.iterdir()):
        raise OutputError(
            f"the folder holds {len(list(out.iterdir()))} entries, needed is a new or an empty one",
            where=str(out),
            hint="choose another folder, or empty this one",
        )
    if out.exists() and not out.is_dir():
        raise OutputError("this is a file, needed is a folder", where=str(out), hint="choose another name")
    if out.resolve().is_relative_to(source.resolve()):
        raise OutputError(f"the target lies within the model's own folder {source}", where=str(out))


@contextmanager
def publish(out: Path) -> Iterator[Path]:
    """Give a private folder to write into; it becomes ``out`` at the end, or vanishes if anything is raised."""
    from safetensors import SafetensorError

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as name:
            work = Path(name) / "model"
            work.mkdir()
            yield work
            sync_folder(work)
            work.rename(out)
        sync(out.parent)
    except (OSError, SafetensorError) as error:
        raise OutputError(
            f"the folder cannot be written: {error}", where=str(out), hint="is the disk full, or not yours to write?"
        ) from error
