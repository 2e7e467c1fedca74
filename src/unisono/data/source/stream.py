"""The bytes of a file from the first to the last, once: counted, hashed as they lie there, decompressed on the way.

An archive that is cut off or damaged, a file that ends before its size and bytes behind an archive are a DataError;
what comes before has been read by then. Several gzip members or zstandard frames in one file are one content.
Damage inside a zstandard frame that was written without a checksum (the command writes one) can go unseen.
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from unisono.data.source.libraries import load_library
from unisono.data.source.names import Compression
from unisono.data.source.remote import open_remote, told
from unisono.errors import DataError, OutputError, TransferError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_PIECE_BYTES = 2**20
_INPUT_BYTES = 2**18
_GZIP = b"\x1f\x8b"
_ZSTD = b"(\xb5/\xfd"
_ZSTD_SKIPPABLE = tuple(bytes([0x50 + i]) + b"*M\x18" for i in range(16))


class Digest(Protocol):
    """Takes the bytes of a file, as those of hashlib do."""

    def update(self, data: Buffer, /) -> object:
        """Take some more bytes."""
        ...


class FileBytes(io.RawIOBase):
    """The bytes of a file as they lie there, counted and hashed while they go by."""

    def __init__(self, file: Any, name: str, size: int | None, digest: Digest | None, *, is_remote: bool) -> None:
        self._file = file
        self._name = name
        self._digest = digest
        self.is_remote = is_remote
        self.size = size
        self.num_bytes = 0

    def readable(self) -> bool:
        """Say yes."""
        return True

    def readinto(self, buffer: Buffer) -> int:
        """Read as much as comes; DataError when the file cannot be read or ends before its size."""
        view = memoryview(buffer).cast("B")
        with told(self._name) if self.is_remote else told_locally(self._name):
            if self.is_remote:
                content = self._file.read(len(view))
                num_read = len(content)
                view[:num_read] = content
            else:
                num_read = self._file.readinto(view)
        self.num_bytes += num_read
        if self._digest is not None:
            self._digest.update(view[:num_read])
        if not num_read and len(view) and self.is_remote and self.size is not None and self.num_bytes != self.size:
            raise TransferError(
                f"the server said that the file has {self.size:,} bytes, and {self.num_bytes:,} came",
                where=self._name,
                hint="start again",
            )
        return num_read

    def drain(self) -> None:
        """Read to the end, so that everything is hashed."""
        buffer = bytearray(_PIECE_BYTES)
        while self.readinto(buffer):
            pass


@contextmanager
def told_locally(name: str) -> Iterator[None]:
    """Turn what the operating system says about a local file into a DataError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", where=name) from error


@contextmanager
def open_bytes(name: str, size: int | None, digest: Digest | None, *, is_remote: bool) -> Iterator[FileBytes]:
    """Open a file or URL for one pass."""
    if is_remote:
        with open_remote(name, size) as file:
            yield FileBytes(file, name, size, digest, is_remote=True)
        return
    with told_locally(name):
        opened = open(name, "rb", buffering=0)  # noqa: SIM115 (closed below; its errors are told, those inside are not)
    with opened:
        yield FileBytes(opened, name, os.fstat(opened.fileno()).st_size, digest, is_remote=False)


class _Decompressed(io.RawIOBase):
    """What an archive holds, of any number of members; both libraries take the same calls."""

    def __init__(self, source: FileBytes, name: str, kind: str) -> None:
        self._source = source
        self._name = name
        self._kind = kind
        self._input = bytearray(_INPUT_BYTES)
        self._pending = b""
        self._has_ended = False
        self._num_members = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")
        while not self._has_ended:
            content = self._some(len(view))
            if content:
                view[: len(content)] = content
                return len(content)
        return 0

    def _some(self, limit: int) -> bytes:
        """Return some bytes of the content; nothing before more was read or the end noted."""
        raise NotImplementedError

    def _fill(self, needed: int = 1) -> bool:
        """Read until so many bytes wait to be decompressed; False when there are no more."""
        while len(self._pending) < needed:
            num_read = self._source.readinto(self._input)
            if not num_read:
                return False
            self._pending += self._input[:num_read]
        return True

    def _begins(self, signatures: tuple[bytes, ...], padding: bytes) -> bool:
        """Say whether another member follows; note the end when nothing does, refuse anything else."""
        is_enough = self._fill(max(map(len, signatures)))
        if self._pending.startswith(signatures):
            self._num_members += 1
            return True
        if self._num_members and padding:
            self._pending = self._pending.lstrip(padding)
            while not self._pending and self._fill():
                self._pending = self._pending.lstrip(padding)
        if not self._pending and self._num_members:
            self._has_ended = True
            return False
        if not self._num_members and not is_enough and any(item.startswith(self._pending) for item in signatures):
            raise self._cut_off()
        if not self._num_members:
            raise DataError(f"is no {self._kind} archive, though its name says so", where=self._name)
        raise DataError(f"something that is not {self._kind} follows the archive", where=self._name)

    def _cut_off(self) -> DataError:
        return DataError(
            f"the {self._kind} archive is cut off after {self._source.num_bytes:,} bytes",
            where=self._name,
            hint="fetch or make it again",
        )

    def _damaged(self, error: BaseException) -> DataError:
        return DataError(
            f"the {self._kind} archive is damaged within its first {self._source.num_bytes:,} bytes: {error}",
            where=self._name,
            hint="fetch or make it again",
        )


class _Gzip(_Decompressed):
    def __init__(self, source: FileBytes, name: str) -> None:
        super().__init__(source, name, "gzip")
        self._member: Any = None

    def _some(self, limit: int) -> bytes:
        if self._member is None:
            if not self._begins((_GZIP,), b"\0"):
                return b""
            self._member = zlib.decompressobj(wbits=31)
        if not self._fill():
            raise self._cut_off()
        try:
            content: bytes = self._member.decompress(self._pending, limit)
        except zlib.error as error:
            raise self._damaged(error) from error
        self._pending = self._member.unconsumed_tail
        if self._member.eof:
            self._pending = self._member.unused_data
            self._member = None
        return content


class _Zstd(_Decompressed):
    def __init__(self, source: FileBytes, name: str) -> None:
        super().__init__(source, name, "zstandard")
        module = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
        self._library = load_library(module, "zstd", name)
        self._frame: Any = None

    def _some(self, limit: int) -> bytes:
        if self._frame is None:
            if not self._begins((_ZSTD, *_ZSTD_SKIPPABLE), b""):
                return b""
            self._frame = self._library.ZstdDecompressor()
        if self._frame.needs_input and not self._fill():
            raise self._cut_off()
        given, self._pending = self._pending, b""
        try:
            content: bytes = self._frame.decompress(given, limit)
        except self._library.ZstdError as error:
            raise self._damaged(error) from error
        if self._frame.eof:
            self._pending = self._frame.unused_data
            self._frame = None
        return content


def open_content(source: FileBytes, name: str, compression: Compression) -> io.BufferedReader:
    """Return the content of a file, decompressed, for reading once."""
    if compression == "":
        return io.BufferedReader(source, _PIECE_BYTES)
    return io.BufferedReader((_Gzip if compression == "gzip" else _Zstd)(source, name), _PIECE_BYTES)


@contextmanager
def random_access(
    source: FileBytes, name: str, compression: Compression, digest: Digest | None, scratch: Path | None
) -> Iterator[BinaryIO]:
    """Give a file in which one may jump about: the file itself, or its content in an unnamed file in ``scratch``.

    OutputError when there is no room for that.
    """
    is_itself = compression == "" and not source.is_remote
    if is_itself:
        if digest is not None:
            source.drain()
        with told_locally(name):
            opened: Any = open(name, "rb")  # noqa: SIM115 (closed below; its errors are told, those inside are not)
    else:
        opened = _unnamed_file(scratch)
    with opened as file:
        if not is_itself:
            _spool(open_content(source, name, compression), file, scratch)
        yield file


def _unnamed_file(scratch: Path | None) -> Any:
    try:
        return tempfile.TemporaryFile(dir=scratch)
    except OSError as error:
        raise _no_room(error, scratch) from error


def _spool(content: io.BufferedReader, file: BinaryIO, scratch: Path | None) -> None:
    try:
        while piece := content.read(_PIECE_BYTES):
            file.write(piece)
        file.seek(0)  # writes what is buffered
    except OSError as error:
        raise _no_room(error, scratch) from error


def _no_room(error: OSError, scratch: Path | None) -> OutputError:
    return OutputError(
        f"a file that must be unpacked or fetched before it is read cannot be written: {error.strerror or error}",
        where=str(scratch or tempfile.gettempdir()),
        hint="make room there, or unpack it yourself",
    )
