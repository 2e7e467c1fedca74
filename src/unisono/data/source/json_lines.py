"""JSON Lines: one record a line, lines ending at newline bytes only.

U+2028 and U+0085 are ordinary characters inside a text. Lines of nothing but white space are passed over, and count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from unisono.data.source.raw import Raw, too_big, unusable
from unisono.data.source.stream import FileBytes

_PIECE_BYTES = 2**16


def read_json_lines(content: BinaryIO, source: FileBytes, limit_bytes: int) -> Iterator[Raw]:
    """Yield the lines, unparsed; one over the limit is passed over piece by piece."""
    number = 0
    readline = content.readline
    while line := readline(limit_bytes + 1):
        number += 1
        if len(line) > limit_bytes and not line.endswith(b"\n"):
            while (rest := readline(_PIECE_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield unusable(str(number), too_big(limit_bytes), source.num_bytes)
        elif not line.isspace():
            yield Raw(str(number), line, None, "", source.num_bytes)
