"""From the names of a run file to source files: paths, globs, brace ranges, URLs, data set folders and hub ids.

Every name that is missing, unreadable or of an unknown kind is reported, all in one error. A glob that matches
nothing and a file that is named twice are errors too.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from unisono.data.source.datasets import dataset_files, find_dataset, hub_id
from unisono.data.source.names import HUB, REMOTE_SCHEMES, Compression, Kind, expand_braces, is_glob, kind_of, scheme
from unisono.data.source.remote import list_matches, read_info, size_of, stamp_of
from unisono.data.source.stream import Digest, told_locally
from unisono.errors import DataError

_NUM_NAMED = 20
_NUM_ASKING = 16
_NUM_SKETCHED, _SKETCH_BYTES = 8, 2**15  # few, since each is a way to a disk that may be far


@dataclass(frozen=True)
class SourceFile:
    """One file, data set folder or hub id to read: ``name`` is the path or URL as a person is shown it."""

    name: str
    kind: Kind
    compression: Compression
    is_remote: bool
    _known_bytes: int | None = field(default=None, repr=False, compare=False)
    _known_stamp: str | None = field(default=None, repr=False, compare=False)

    @property
    def num_bytes(self) -> int | None:
        """The size as the file lies there, compressed or not; None when it is not known."""
        if self.is_remote:
            return self._known_bytes
        with told_locally(self.name):
            return sum(path.stat().st_size for path in self._paths())

    def stamp(self) -> str | None:
        """Identify this version without reading it, or return None when nothing is to be trusted.

        Asks the file system or the server anew, each time. A hub id has a stamp when it names a whole commit.
        """
        if self.name.startswith(HUB):
            revision = hub_id(self.name).revision
            is_commit = len(revision) == 40 and all(sign in "0123456789abcdef" for sign in revision)
            return self.name if is_commit else None
        if self.is_remote:
            return stamp_of(self.name, read_info(self.name))
        parts: list[list[str | int]] = []
        with told_locally(self.name):
            for path in self._paths():
                status = path.stat()
                identity = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)
                parts.append([os.path.abspath(path), *identity])
        return orjson.dumps(parts).decode()

    def version(self) -> str | None:
        """Return what changes when the file is written to, and not, as the stamp does, when it is linked or renamed.

        Asks anew, each time. None as for ``stamp``.
        """
        if self.is_remote:
            return self.stamp()
        with told_locally(self.name):
            states = [path.stat() for path in self._paths()]
        return orjson.dumps([[state.st_size, state.st_mtime_ns] for state in states]).decode()

    def first_version(self) -> str | None:
        """Return the version of a remote file as it was when its name was looked up, without asking again."""
        return self._known_stamp if self.is_remote and self.kind != "dataset" else self.version()

    def sketch(self) -> str | None:
        """Identify the content without reading all of it, the same for copies on other machines; None as for ``stamp``.

        Of a local file its size and pieces from everywhere in it: all of a small one, so an edit of a large one that
        changes neither the size nor any of the pieces is not told. Of a remote file what its server says.
        """
        if self.is_remote:
            return self.stamp() if self.name.startswith(HUB) else self._known_stamp
        digest = hashlib.sha256()
        with told_locally(self.name):
            for path in self._paths():
                _sketch(path, digest)
        return digest.hexdigest()

    def _paths(self) -> list[Path]:
        return dataset_files(Path(self.name)) if self.kind == "dataset" else [Path(self.name)]


def _sketch(path: Path, digest: Digest) -> None:
    """Hash a file's size and pieces of it that are evenly spread over it, the first and the last bytes among them."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(size.to_bytes(8, "little"))
        last = max(0, size - _SKETCH_BYTES)
        starts = (last * i // (_NUM_SKETCHED - 1) for i in range(_NUM_SKETCHED))
        for start in starts if last >= _NUM_SKETCHED * _SKETCH_BYTES else range(0, size, _SKETCH_BYTES):
            digest.update(os.pread(file.fileno(), _SKETCH_BYTES, start))


def expand(names: Sequence[str]) -> tuple[SourceFile, ...]:
    """Return the files that the names stand for, in their order; matches of a glob are sorted.

    DataError names everything that cannot be read. Servers are asked for each of their files.
    """
    problems: list[DataError] = []
    candidates: list[str] = []
    for name in names:
        try:
            candidates += _candidates(name)
        except DataError as error:
            problems.append(error)
    # Asking servers is waiting: many at once. Local files come through the same way.
    with ThreadPoolExecutor(_NUM_ASKING) as pool:
        results = list(pool.map(_open_or_problem, candidates))
    problems += [result for result in results if isinstance(result, DataError)]
    files = tuple(result for result in results if isinstance(result, SourceFile))
    problems += _named_twice(files)
    if len(problems) > _NUM_NAMED:
        more = DataError(f"... and {len(problems) - _NUM_NAMED:,} more such problems")
        problems = [*problems[:_NUM_NAMED], more]
    if problems:
        raise DataError.of(problems)
    return files


def _open_or_problem(name: str) -> SourceFile | DataError:
    try:
        return _check(name)
    except DataError as error:
        return error


def _candidates(name: str) -> Iterator[str]:
    """Yield the names that one name of the run file stands for."""
    if not name:
        raise DataError("an empty name stands among the data files")
    kind = scheme(name)
    if kind == "hub" or os.path.exists(name):
        yield name
        return
    if kind and kind not in REMOTE_SCHEMES:
        known = ", ".join(f"{item}://" for item in (*REMOTE_SCHEMES, "hub"))
        raise DataError(f"addresses of the kind {kind}:// are not read; {known} are", where=name)
    for one in expand_braces(name):
        if not is_glob(one) or os.path.exists(one):
            yield one
            continue
        found = list_matches(one) if kind else sorted(_local_matches(one))
        if not found:
            raise DataError("no file matches this pattern", where=one, hint=_place_hint(kind))
        yield from found


def _local_matches(pattern: str) -> Iterator[str]:
    """Yield files and data set folders; what lies inside such a folder is not taken again."""
    matches = glob.glob(pattern, recursive=True)
    folders = {path for path in matches if os.path.isdir(path) and find_dataset(Path(path))}
    for path in matches:
        is_inside = any(str(parent) in folders for parent in Path(path).parents)
        if path in folders or (not os.path.isdir(path) and not is_inside):
            yield path


def _place_hint(kind: str) -> str | None:
    return None if kind else "data paths are relative to the working folder"


def _check(name: str) -> SourceFile:
    """Return the file of a name; DataError when it is not there, cannot be opened or is of no known kind."""
    if name.startswith(HUB):
        hub_id(name)
        return SourceFile(name, "dataset", "", True)
    if scheme(name) in REMOTE_SCHEMES:
        kind, compression = kind_of(name)
        info = read_info(name)
        return SourceFile(name, kind, compression, True, size_of(info), stamp_of(name, info))
    path = Path(name)
    if path.is_dir():
        return SourceFile(_dataset_folder(path, name), "dataset", "", False)
    if not path.exists():
        raise DataError("the file does not exist", where=name, hint=_place_hint(""))
    kind, compression = kind_of(name)
    if not path.is_file():
        raise DataError("is not a file, but a pipe, socket or device", where=name, hint="save it as a file")
    try:
        path.open("rb").close()
    except OSError as error:
        raise DataError(f"the file cannot be opened: {error.strerror}", where=name) from error
    return SourceFile(name, kind, compression, False)


def _dataset_folder(path: Path, name: str) -> str:
    splits = find_dataset(path)
    if not splits:
        raise DataError(
            "is a folder, and no data set that save_to_disk wrote; files are needed",
            where=name,
            hint=f"name its files: {name.rstrip('/')}/*.jsonl",
        )
    if len(splits) > 1:
        raise DataError(
            f"the data set has several splits: {', '.join(splits)}",
            where=name,
            hint=f"name the one that is meant: {name.rstrip('/')}/{splits[0]}",
        )
    return str(path / splits[0]) if splits[0] else name


def _named_twice(files: Sequence[SourceFile]) -> list[DataError]:
    seen: dict[str, str] = {}
    problems = []
    for file in files:
        identity = file.name if file.is_remote else os.path.realpath(file.name)
        if identity in seen:
            also = f" (also as {seen[identity]})" if seen[identity] != file.name else ""
            problems.append(
                DataError(
                    f"is named twice{also}; its records would be learned twice",
                    where=file.name,
                    hint="name it once; length.epochs says how often all records are seen",
                )
            )
        seen[identity] = file.name
    return problems
