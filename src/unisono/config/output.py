"""Try the output folder before hours are spent: create, write, sync, rename and delete a probe file."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from unisono.errors import OutputError


def check_output_dir(path: Path) -> None:
    """Raise OutputError unless the run folder can be written; leaves nothing behind, not even the folder."""
    if os.path.islink(path) and not os.path.exists(path):
        raise OutputError(f"the output folder {path} is a link to {os.readlink(path)}, which does not exist")
    missing = _missing_folders(path)
    made: list[Path] = []
    try:
        for folder in missing:
            folder.mkdir(exist_ok=True)
            made.append(folder)
        _probe(path)
    except OSError as error:
        hint = "choose another run.output_dir, or make room there" if error.errno else None
        raise OutputError(f"the output folder {path} cannot be written: {error.strerror}", hint=hint) from None
    finally:
        for folder in reversed(made):
            _remove_if_empty(folder)


def _missing_folders(path: Path) -> list[Path]:
    """Give the folders still to be made, outermost first. Raises OutputError where a file is in the way."""
    missing = []
    for folder in (path, *path.parents):
        if os.path.isdir(folder):
            break
        if os.path.lexists(folder):
            what = "the output folder" if folder == path else f"the output folder {path} cannot be made:"
            raise OutputError(f"{what} {folder} is not a folder", hint="choose another run.output_dir")
        missing.append(folder)
    return missing[::-1]


def _probe(folder: Path) -> None:
    """Do once what a checkpoint does: write, sync, rename, delete."""
    first = folder / f".unisono-probe-{uuid.uuid4().hex}"
    second = first.with_suffix(".renamed")
    try:
        with first.open("xb") as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
        first.rename(second)
    finally:
        first.unlink(missing_ok=True)
        second.unlink(missing_ok=True)


def _remove_if_empty(folder: Path) -> None:
    """Take the folder away again, unless somebody has put something into it meanwhile."""
    try:
        folder.rmdir()
    except OSError:
        return
