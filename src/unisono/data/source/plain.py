"""Plain text: a whole file is one record, ``{"text": ...}``, its characters as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from unisono.data.source.raw import Raw, decode, too_big, unusable
from unisono.data.source.stream import FileBytes

_PIECE_BYTES = 2**20


def read_text(content: BinaryIO, source: FileBytes, limit_bytes: int) -> Iterator[Raw]:
    """Yield the one record of the file."""
    whole = content.read(limit_bytes + 1)
    while content.read(_PIECE_BYTES):
        pass
    if len(whole) > limit_bytes:
        problem = f"{too_big(limit_bytes)}; cut the file into several, or make JSON Lines of it"
        yield unusable("1", problem, source.num_bytes)
        return
    text, problem = decode(whole)
    yield Raw("1", None, None if problem else {"text": text}, problem, source.num_bytes)
