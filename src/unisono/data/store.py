"""Tokens on disk: written once, then memory-mapped and never changed.

A store is a folder: ``tokens.bin`` (int32, all samples one after the other), ``targets.bin`` (one byte per token,
1 = predicted), ``index.bin`` (int64 ``[samples, 5]``: first token, tokens, targets, record number, CRC-32 of the ids
and targets) and ``store.json`` (written last: version, key, sizes, SHA-256 of the index). All of it is mapped: opening
reads the index alone, and each sample is compared with its sum when it is read: nothing damaged is ever trained.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import orjson

from unisono.durable import hash_file, open_at, sync, write_synced
from unisono.errors import DataError

STORE_VERSION = 3
Ints = npt.NDArray[np.int64]
Ids = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]
_START, _LENGTH, _TARGETS, _RECORD, _SUM = _COLUMNS = range(5)
_BYTES_PER_SAMPLE = len(_COLUMNS) * 8
_PIECE_SAMPLES, _PIECE_TOKENS = 1 << 14, 1 << 20


class Column(Protocol):
    """A number of each sample; reads what is asked for."""

    def __getitem__(self, samples: Ints, /) -> Ints:
        """Return the numbers of some samples."""


class TokenStore(Protocol):
    """Prepared samples, of one store or of several laid end to end.

    lengths: tokens of each. num_targets: a target is a token that is predicted, so the first one never counts.
    record: the record's place in the source order over all files (the sample's id; records left out leave gaps).
    """

    @property
    def key(self) -> str:
        """Hash of what the samples were made of."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""

    @property
    def lengths(self) -> Column:
        """Tokens of each sample."""

    @property
    def num_targets(self) -> Column:
        """Targets of each sample."""

    @property
    def record(self) -> Column:
        """Number of each sample's record."""

    def __len__(self) -> int:
        """Count the samples."""

    def sample(self, index: int) -> tuple[Ids, Flags]:
        """Return the ids (int32 ``[tokens]``) and which of them are targets (bool ``[tokens]``; never the first)."""


@dataclass(frozen=True, eq=False)
class Store:
    """One store, read-only and memory-mapped; the columns are int64 ``[samples]``. See ``TokenStore``."""

    folder: Path
    key: str
    num_records: int
    num_tokens: int
    longest: int
    lengths: Ints = field(repr=False)
    num_targets: Ints = field(repr=False)
    record: Ints = field(repr=False)
    _starts: Ints = field(repr=False)
    _sums: Ints = field(repr=False)
    _ids: Ids = field(repr=False)
    _is_target: Flags = field(repr=False)

    def __len__(self) -> int:
        """Count the samples."""
        return len(self.lengths)

    def sample(self, index: int) -> tuple[Ids, Flags]:
        """Return the ids and the targets of a sample; see ``TokenStore``. DataError when they are damaged."""
        start = int(self._starts[index])
        stop = start + int(self.lengths[index])
        ids, is_target = self._ids[start:stop], self._is_target[start:stop]
        if _sum_of(ids, is_target) != self._sums[index]:
            raise _damaged(self.folder, f"sample {index} is not what was written")
        return ids, is_target

    def pieces(self) -> Iterator[Piece]:
        """Yield all samples in their order, some megabytes at a time (one sample may be more); nothing is copied."""
        begin = 0
        while begin < len(self):
            ends = np.cumsum(self.lengths[begin : begin + _PIECE_SAMPLES])
            end = begin + max(1, int(np.searchsorted(ends, _PIECE_TOKENS, side="right")))
            first = int(self._starts[begin])
            last = first + int(ends[end - begin - 1])
            index = np.column_stack([self.lengths[begin:end], self.num_targets[begin:end], self.record[begin:end]])
            yield Piece(self._ids[first:last], self._is_target[first:last], index)
            begin = end


def open_store(folder: Path) -> Store:
    """Map a store into memory; DataError when it is damaged."""
    try:
        head = orjson.loads((folder / "store.json").read_bytes())
        num_samples, num_tokens = int(head["num_samples"]), int(head["num_tokens"])
        for name, expected in _sizes(num_samples, num_tokens):
            found = (folder / name).stat().st_size
            if found != expected:
                raise _damaged(folder, f"{name} has {found:,} bytes instead of {expected:,}")
        index = _mapped(folder / "index.bin", np.int64, len(_COLUMNS) * num_samples).reshape(-1, len(_COLUMNS))
        if hash_file(folder / "index.bin") != head["index_sha256"]:
            raise _damaged(folder, "index.bin is not what was written")
        return Store(
            folder=folder,
            key=str(head["key"]),
            num_records=int(head["num_records"]),
            num_tokens=num_tokens,
            longest=int(head["longest"]),
            lengths=index[:, _LENGTH],
            num_targets=index[:, _TARGETS],
            record=index[:, _RECORD],
            _starts=index[:, _START],
            _sums=index[:, _SUM],
            _ids=_mapped(folder / "tokens.bin", np.int32, num_tokens),
            _is_target=_mapped(folder / "targets.bin", np.bool_, num_tokens),
        )
    except FileNotFoundError as error:
        raise _damaged(folder, f"{Path(error.filename).name} is missing") from error
    except (orjson.JSONDecodeError, KeyError, ValueError, TypeError) as error:
        raise _damaged(folder, f"store.json is not what was written ({error})") from error


def read_summary(folder: Path) -> dict[str, Any]:
    """Read what ``build`` has written down about the stores in ``folder``; DataError when it is damaged."""
    try:
        summary = orjson.loads((folder / "prepared.json").read_bytes())
        sum_then = summary.pop("sum")
        if sum_then != _sum_of(orjson.dumps(summary)):
            raise ValueError("its sum is another one")
    except FileNotFoundError as error:
        raise _damaged(folder, "prepared.json is missing") from error
    except (orjson.JSONDecodeError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise _damaged(folder, f"prepared.json is not what was written ({error})") from error
    return dict(summary)


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Write down what ``read_summary`` returns, so that damage is noticed."""
    write_synced(folder / "prepared.json", orjson.dumps(summary | {"sum": _sum_of(orjson.dumps(summary))}))


def _damaged(folder: Path, how: str) -> DataError:
    hint = "remove the folder; it is made anew at the next start"
    return DataError(f"the prepared data is damaged: {how}", where=str(folder), hint=hint)


def _sum_of(*parts: Any) -> int:
    """Return the CRC-32 of some buffers, one after the other."""
    total = 0
    for part in parts:
        total = zlib.crc32(part, total)
    return total


def _mapped(file: Path, dtype: npt.DTypeLike, count: int) -> npt.NDArray[Any]:
    """Map a file as a plain read-only array (an empty file cannot be mapped)."""
    array = np.asarray(np.memmap(file, dtype, mode="r")) if count else np.zeros(0, dtype)
    array.flags.writeable = False
    return array


class Joined:
    """Several stores laid end to end: sample and record numbers go on from one to the next."""

    def __init__(self, stores: Sequence[Store]) -> None:
        self.stores = tuple(stores)
        self.key = "+".join(store.key for store in stores)
        self.num_tokens = sum(store.num_tokens for store in stores)
        self.longest = max(store.longest for store in stores)
        self._ends = np.cumsum([len(store) for store in stores])
        self._records_before = np.cumsum([0, *(store.num_records for store in stores[:-1])])

    def __len__(self) -> int:
        """Count the samples."""
        return int(self._ends[-1])

    @property
    def lengths(self) -> Column:
        """Tokens of each sample."""
        return _JoinedColumn(self._ends, [store.lengths for store in self.stores])

    @property
    def num_targets(self) -> Column:
        """Targets of each sample."""
        return _JoinedColumn(self._ends, [store.num_targets for store in self.stores])

    @property
    def record(self) -> Column:
        """Number of each sample's record."""
        return _JoinedColumn(self._ends, [store.record for store in self.stores], self._records_before)

    def sample(self, index: int) -> tuple[Ids, Flags]:
        """Return the ids and the targets of a sample; see ``TokenStore``."""
        place = int(np.searchsorted(self._ends, index, side="right"))
        before = int(self._ends[place - 1]) if place else 0
        return self.stores[place].sample(index - before)


class _JoinedColumn:
    def __init__(self, ends: Ints, columns: list[Ints], added: Ints | None = None) -> None:
        self._ends = ends
        self._columns = columns
        self._added = np.zeros(len(columns), np.int64) if added is None else added

    def __getitem__(self, samples: Ints) -> Ints:
        places = np.searchsorted(self._ends, samples, side="right")
        found = np.empty(len(samples), np.int64)
        for place, column in enumerate(self._columns):
            here = places == place
            before = self._ends[place - 1] if place else 0
            found[here] = column[samples[here] - before] + self._added[place]
        return found


@dataclass(frozen=True, eq=False)
class Piece:
    """Samples on their way into a store: their ids and targets end to end, and what the index needs.

    ids: int32 ``[tokens]``. is_target: bool ``[tokens]``. index: int64 ``[samples, 3]``: tokens, targets, record.
    """

    ids: Ids
    is_target: Flags
    index: Ints


@dataclass(frozen=True)
class Mark:
    """How much of a store is safely on disk."""

    num_samples: int = 0
    num_tokens: int = 0
    longest: int = 0

    def is_within(self, folder: Path) -> bool:
        """Say whether the files of a store reach so far; FileNotFoundError when one is not there."""
        return all((folder / name).stat().st_size >= size for name, size in _sizes(self.num_samples, self.num_tokens))


def _sizes(num_samples: int, num_tokens: int) -> list[tuple[str, int]]:
    """Return what the files of a store are called, and how many bytes they have."""
    index_bytes = _BYTES_PER_SAMPLE * num_samples
    return [("tokens.bin", 4 * num_tokens), ("targets.bin", num_tokens), ("index.bin", index_bytes)]


class StoreWriter:
    """Append samples to a store that is complete once ``finish`` returns.

    After ``mark`` everything written so far survives a power cut; a writer that is given the mark goes on from there.
    """

    def __init__(self, folder: Path, at: Mark = Mark()) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self._at = at
        self._files = {name: open_at(folder / name, size) for name, size in _sizes(at.num_samples, at.num_tokens)}

    def __len__(self) -> int:
        """Count the samples written so far."""
        return self._at.num_samples

    def append(self, piece: Piece) -> None:
        """Write some samples."""
        lengths = piece.index[:, 0]
        if len(lengths) == 0:
            return
        ends = np.cumsum(lengths)
        ids, is_target = np.ascontiguousarray(piece.ids, "<i4"), np.ascontiguousarray(piece.is_target, np.bool_)
        places = zip((ends - lengths).tolist(), ends.tolist())
        sums = [_sum_of(ids[begin:end], is_target[begin:end]) for begin, end in places]
        index = np.column_stack([self._at.num_tokens + ends - lengths, piece.index, sums])
        self._files["tokens.bin"].write(ids.data)
        self._files["targets.bin"].write(is_target.data)
        self._files["index.bin"].write(index.astype("<i8").tobytes())
        self._at = Mark(
            self._at.num_samples + len(lengths),
            self._at.num_tokens + int(lengths.sum()),
            max(self._at.longest, int(lengths.max())),
        )

    def mark(self) -> Mark:
        """Wait until all that was written is on disk, and say how much it is."""
        for name, file in self._files.items():
            file.flush()
            sync(self.folder / name)
        return self._at

    def finish(self, key: str, num_records: int) -> None:
        """Complete the store; ``num_records``: records in its files, those left out too."""
        at = self.mark()
        head = {
            "version": STORE_VERSION,
            "key": key,
            "num_samples": at.num_samples,
            "num_tokens": at.num_tokens,
            "num_records": num_records,
            "longest": at.longest,
            "index_sha256": hash_file(self.folder / "index.bin"),
        }
        write_synced(self.folder / "store.json", orjson.dumps(head))
        sync(self.folder)

    def __enter__(self) -> StoreWriter:
        """Return the writer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files."""
        with ExitStack() as stack:  # on a full disk each of them may fail, and all are to be closed
            for file in self._files.values():
                stack.callback(file.close)
