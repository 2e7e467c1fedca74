"""What is known of files without reading them: their content's hash, found by a stamp (place, size, times, inode).

A file whose stamp is not known, but whose size is that of a known one, is read to compare: moving, copying or touching
a file must not cost its preparation. Any other file is hashed while it is prepared, in the same pass.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from unisono.data.source.files import SourceFile
from unisono.data.source.read import read_records

_TICK_SECONDS = 0.05  # the clock of a file's times may stand still for so long ...
_COARSE_TICK_SECONDS = 2.0  # ... or for so long, where they have no fractions


class Digests:
    """The known hashes, one small file each, below a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, file: SourceFile, progress: Callable[[str], None]) -> str | None:
        """Return the SHA-256 of a file's content, or None when it has to be read anyway."""
        place = self._folder / str(file.num_bytes)
        stamp = file.stamp()
        if stamp is not None and (known := place / _name(stamp)).is_file():
            return known.read_text(encoding="ascii")
        if not place.is_dir():
            return None
        progress(f"preparing data: {file.name} is compared with data that was prepared before")
        digest = hashlib.sha256()
        for _ in read_records(file, digest, scratch=self._folder):
            pass
        self.remember(file, stamp, digest.hexdigest())
        return digest.hexdigest()

    def remember(self, file: SourceFile, stamp: str | None, digest: str) -> None:
        """Note the hash of a file as it was under ``stamp``; by one rename."""
        place = self._folder / str(file.num_bytes)
        place.mkdir(parents=True, exist_ok=True)
        # A stamp without a time that has passed could stand for two contents: then only the size is remembered.
        name = _name(stamp) if stamp is not None and not _is_fresh(file) else f"of-{digest[:32]}"
        private = place.parent / f".{name}-{secrets.token_hex(4)}"
        private.write_text(digest, encoding="ascii")
        private.replace(place / name)


def _name(stamp: str) -> str:
    return hashlib.sha256(stamp.encode()).hexdigest()[:32]


def _is_fresh(file: SourceFile) -> bool:
    """Say whether a local file was changed so lately that its times may not tell the next change."""
    if file.is_remote:
        return False
    changed = os.stat(file.name).st_ctime_ns
    tick = _TICK_SECONDS if changed % 10**9 else _COARSE_TICK_SECONDS
    return time.time() - changed / 10**9 < tick
