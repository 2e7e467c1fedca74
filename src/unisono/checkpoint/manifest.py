"""What makes a folder a checkpoint: a manifest, written last, with the size and hash of every file.

A checkpoint is chosen by the update number inside its manifest, never by its name or its file times. No torch here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from unisono.durable import hash_file, sync, write_synced
from unisono.errors import CheckpointError

FORMAT = 2  # 2: the manifest has a sum of itself
NAME = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """``update``: finished updates; ``state``: the trainer's scalars; ``settings``: what must not change on resume."""

    update: int
    epoch: int
    world: int
    state: dict[str, Any]
    settings: dict[str, Any]
    validation_loss: float | None = None
    files: dict[str, dict[str, Any]] = field(default_factory=dict)


def seal(folder: Path, manifest: Manifest) -> Manifest:
    """Hash every file in ``folder`` and write the manifest: the last file, so that its presence means complete."""
    files = {
        str(file.relative_to(folder)): {"bytes": file.stat().st_size, "sha256": hash_file(file)}
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != NAME
    }
    sealed = Manifest(**{**manifest.__dict__, "files": files})
    values = {"format": FORMAT, **sealed.__dict__}
    write_synced(folder / NAME, orjson.dumps(values | {"sha256": sum_of(values)}, option=orjson.OPT_INDENT_2))
    sync(folder)
    return sealed


def sum_of(values: dict[str, Any]) -> str:
    """Return the SHA-256 of what a manifest says, which it carries itself."""
    return hashlib.sha256(orjson.dumps(values, option=orjson.OPT_SORT_KEYS)).hexdigest()


def read(folder: Path) -> Manifest:
    """Read a manifest; anything that is not one is a CheckpointError that says why."""
    file = folder / NAME
    if not file.is_file():
        raise CheckpointError("it has no manifest: the save was cut short", where=str(folder))
    try:
        values = orjson.loads(file.read_bytes())
        if values["format"] != FORMAT:
            raise CheckpointError(f"its manifest is not of format {FORMAT}", where=str(file))
        if values.pop("sha256") != sum_of(values):
            raise CheckpointError("its manifest is damaged: its hash is not its own", where=str(file))
        del values["format"]
        if not values["files"]:
            raise CheckpointError("its manifest names no files", where=str(file))
        manifest = Manifest(**values)
        if type(manifest.update) is not int or not all(
            {"bytes", "sha256"} <= facts.keys() for facts in manifest.files.values()
        ):
            raise CheckpointError("its manifest is not one of ours", where=str(file))
        return manifest
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"its manifest cannot be read: {error}", where=str(file)) from None


def verify(folder: Path) -> Manifest:
    """Check every file's size and hash against the manifest before anything of it is loaded."""
    manifest = read(folder)
    for name, facts in manifest.files.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{name} is missing", where=str(folder))
        size = file.stat().st_size
        if size != facts["bytes"]:
            raise CheckpointError(f"{name} has {size} bytes, its manifest says {facts['bytes']}", where=str(folder))
        if hash_file(file) != facts["sha256"]:
            raise CheckpointError(f"{name} is damaged: its hash is not the manifest's", where=str(folder))
    return manifest


def candidates(checkpoints: Path) -> Iterator[tuple[Path, Manifest | CheckpointError]]:
    """Yield the folders that look like checkpoints, newest update first; unreadable ones come first of all.

    Private folders (a leading dot) are saves that did not finish, and are not looked at.
    """
    found: list[tuple[Path, Manifest | CheckpointError]] = []
    for folder in sorted(checkpoints.iterdir()) if checkpoints.is_dir() else []:
        if not folder.is_dir() or folder.name.startswith("."):
            continue
        try:
            found.append((folder, read(folder)))
        except CheckpointError as error:
            found.append((folder, error))
    yield from sorted(found, key=lambda pair: -pair[1].update if isinstance(pair[1], Manifest) else -(2**62))


def newest_sound(checkpoints: Path, last: int | None = None) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint whose files are all as its manifest says, and why newer ones were passed over.

    Those of updates after ``last`` are not looked at.
    """
    passed_over = []
    for folder, manifest in candidates(checkpoints):
        if isinstance(manifest, CheckpointError):
            passed_over.append(f"ignored {folder.name}: {manifest.message}")
            continue
        if last is not None and manifest.update > last:
            continue
        try:
            verify(folder)
        except CheckpointError as error:
            passed_over.append(f"ignored {folder.name}: {error.message}")
            continue
        return folder, passed_over
    return None, passed_over


def compare_settings(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Name the settings that differ, with both values."""
    keys = sorted(then.keys() | now.keys())
    return [f"{k}: {then.get(k)!r} then, {now.get(k)!r} now" for k in keys if then.get(k) != now.get(k)]
