"""Put bytes and names on the disk: what is written here survives a power cut, or was never there; and tell damage."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import BinaryIO


def write_synced(file: Path, data: bytes) -> None:
    """Write a file and wait until it is on disk."""
    with file.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def replace_file(file: Path, data: bytes) -> None:
    """Write a file by one rename: it has its old content, or all of the new one."""
    private = file.with_name(f".{file.name}.tmp")
    write_synced(private, data)
    os.replace(private, file)


def open_at(file: Path, num_bytes: int) -> BinaryIO:
    """Open for writing on after the first ``num_bytes``; what stands behind them is dropped."""
    handle = file.open("r+b" if file.exists() else "w+b")
    handle.truncate(num_bytes)
    handle.seek(num_bytes)
    return handle


def hash_file(file: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with file.open("rb") as data:
        for block in iter(lambda: data.read(2**20), b""):
            digest.update(block)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names and renames, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def swap(private: Path, target: Path) -> None:
    """Publish a folder whose files are on disk by one rename; what was ``target`` before is moved aside, then removed.

    A process killed in between leaves the new one, the old one, or (between two renames) the old one under the name
    ``.NAME.old``.
    """
    old = target.with_name(f".{target.name}.old")
    if target.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(target, old)
    os.rename(private, target)
    sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Wait until a folder and every file right below it are on disk."""
    for path in [*folder.iterdir(), folder]:
        sync(path)
