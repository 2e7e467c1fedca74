"""Put bytes and names on the disk: what is written here survives a power cut, or was never there."""

from __future__ import annotations

import os
from pathlib import Path


def write_synced(file: Path, data: bytes) -> None:
    """Write a file and wait until it is on disk."""
    with file.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names and renames, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
