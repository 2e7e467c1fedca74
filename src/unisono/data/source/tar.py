"""The members of a tar archive, in order, in one pass, strictly.

ustar, GNU (long names, large sizes) and pax archives. The standard library's reader takes a damaged header for the end
of the archive and says nothing; here it is an error, as is an archive without its end mark, so that no member is lost
unseen. Nothing is ever written to disk; links, devices and sparse files have no content here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from unisono.errors import DataError

BLOCK_BYTES = 512
_PIECE_BYTES = 2**20
_MAX_HEADER_BYTES = 2**20
_FILES = (b"\0", b"0", b"7")
_NO_CONTENT = (b"1", b"2", b"3", b"4", b"5", b"6")
_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL = b"L", b"K", b"x", b"g"


@dataclass
class Member:
    """A member: its content is to be read or passed over before the next one. ``is_file``: not a link and the like."""

    name: str
    kind: bytes
    num_bytes: int
    is_file: bool


class TarReader:
    """Walk over the members; DataError names the archive and the member after which it is damaged or cut off."""

    def __init__(self, content: BinaryIO, name: str) -> None:
        self._content = content
        self._name = name
        self._last = ""
        self._left = 0
        self._padding = 0

    def __iter__(self) -> Iterator[Member]:
        """Yield the members; what is left of a member's content is passed over."""
        extra: dict[bytes, bytes] = {}
        while True:
            self._pass_over()
            header = self._read_exactly(BLOCK_BYTES, "its end mark is missing")
            if not header.strip(b"\0"):
                self._check_end()
                return
            member = self._parse(header)
            self._open(member.num_bytes)
            if member.kind in (_LONG_NAME, _LONG_LINK, _PAX, _PAX_GLOBAL):
                self._read_extra(member, extra)
                continue
            self._apply(extra, member)
            extra = {}
            self._last = member.name
            yield member

    def read(self, member: Member) -> bytes:
        """Return the content of the member that was yielded last."""
        content = self._read_exactly(self._left, "it ends inside a member")
        self._left = 0
        return content

    def _open(self, num_bytes: int) -> None:
        self._left = num_bytes
        self._padding = -num_bytes % BLOCK_BYTES

    def _pass_over(self) -> None:
        left = self._left + self._padding
        self._left = self._padding = 0
        while left:
            left -= len(self._read_exactly(min(left, _PIECE_BYTES), "it ends inside a member"))

    def _read_exactly(self, num_bytes: int, problem: str) -> bytes:
        pieces = []
        left = num_bytes
        while left:  # piecewise: a damaged size must not ask for so much memory at once
            piece = self._content.read(min(left, _PIECE_BYTES))
            if not piece:
                raise self._error(f"the tar archive is cut off: {problem}")
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)

    def _parse(self, header: bytes) -> Member:
        checksum = self._number(header[148:156])
        # The sum counts its own field as spaces.
        if checksum != sum(header) - sum(header[148:156]) + 8 * 32:
            raise self._error("the tar archive is damaged: a header's checksum is wrong")
        kind = header[156:157]
        name = header[:100].split(b"\0", 1)[0]
        if header[257:263] == b"ustar\0" and (prefix := header[345:500].split(b"\0", 1)[0]):
            name = prefix + b"/" + name
        # Links, devices and folders have no content, whatever size their header tells.
        size = 0 if kind in _NO_CONTENT else self._number(header[124:136])
        is_file = kind in _FILES and not name.endswith(b"/")
        return Member(name.decode("utf-8", "replace"), kind, size, is_file)

    def _number(self, field: bytes) -> int:
        """Read an octal number, or one of 256 as base as GNU writes large ones."""
        if field[0] == 0x80:
            return int.from_bytes(field[1:], "big")
        digits = field.strip(b" \0")
        if not all(0x30 <= digit <= 0x37 for digit in digits):
            raise self._error("the tar archive is damaged: a header's number is none")
        return int(digits or b"0", 8)

    def _read_extra(self, member: Member, extra: dict[bytes, bytes]) -> None:
        if member.num_bytes > _MAX_HEADER_BYTES:
            raise self._error(f"the tar archive is damaged: a name of {member.num_bytes:,} bytes")
        content = self.read(member)
        if member.kind == _LONG_NAME:
            extra[b"path"] = content.split(b"\0", 1)[0]
        elif member.kind == _PAX:
            extra.update(self._pax(content))
        elif member.kind == _PAX_GLOBAL and {b"path", b"size"} & set(self._pax(content)):
            raise self._error("the tar archive gives all its members one name or size, which is not read")

    def _pax(self, content: bytes) -> dict[bytes, bytes]:
        """Take the lines ``length key=value`` apart; the length is that of the whole line."""
        found = {}
        place = 0
        while place < len(content):
            length, _, _ = content[place : place + 20].partition(b" ")
            end = place + (int(length) if length.isdigit() else 0)
            key, equals, value = content[place + len(length) + 1 : end - 1].partition(b"=")
            if not equals or end > len(content) or content[end - 1 : end] != b"\n":
                raise self._error("the tar archive is damaged: an extended header cannot be read")
            found[key] = value
            place = end
        return found

    def _apply(self, extra: dict[bytes, bytes], member: Member) -> None:
        if b"path" in extra:
            member.name = extra[b"path"].decode("utf-8", "replace")
        if b"size" in extra and member.kind in _FILES:
            if not extra[b"size"].isdigit() or len(extra[b"size"]) > 20:
                raise self._error("the tar archive is damaged: a size in an extended header is no number")
            member.num_bytes = int(extra[b"size"])
            self._open(member.num_bytes)
        if any(key.startswith(b"GNU.sparse") for key in extra):
            member.is_file = False

    def _check_end(self) -> None:
        """Read on to the end: zeros, and nothing else."""
        while piece := self._content.read(_PIECE_BYTES):
            if piece.strip(b"\0"):
                raise self._error("something follows the end mark of the tar archive")

    def _error(self, message: str) -> DataError:
        place = f" (after its member {self._last})" if self._last else ""
        return DataError(f"{message}{place}", where=self._name, hint="fetch or make it again")
