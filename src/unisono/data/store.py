"""Tokens on disk: written once, then memory-mapped and never changed.

A store is a folder: ``tokens.bin`` (int32, all samples one after the other), ``targets.bin`` (one byte per token,
1 = predicted), ``index.npy`` (int64 ``[3, samples]``: lengths, target counts, record numbers) and ``store.json``
(written last: version, key, sizes).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
import orjson

from unisono.durable import sync, write_synced
from unisono.errors import DataError

STORE_VERSION = 1
Ints = npt.NDArray[np.int64]
Ids = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Store:
    """Prepared samples, read-only and memory-mapped.

    lengths: int64 ``[samples]``, tokens of each. num_targets: int64 ``[samples]``; a target is a token that is
    predicted, so the first one never counts. record: int64 ``[samples]``, the record's place in the source order
    over all files (the sample's id; records left out leave gaps).
    """

    folder: Path
    key: str
    lengths: Ints
    num_targets: Ints
    record: Ints
    _starts: Ints = field(repr=False)
    _ids: Ids = field(repr=False)
    _is_target: Flags = field(repr=False)

    def __len__(self) -> int:
        """Count the samples."""
        return len(self.lengths)

    def sample(self, index: int) -> tuple[Ids, Flags]:
        """Return the ids (int32 ``[tokens]``) and which of them are targets (bool ``[tokens]``; never the first)."""
        start = int(self._starts[index])
        stop = start + int(self.lengths[index])
        return self._ids[start:stop], self._is_target[start:stop]


def open_store(folder: Path) -> Store:
    """Map a store into memory; DataError when it is damaged."""
    head = orjson.loads((folder / "store.json").read_bytes())
    num_samples, num_tokens = int(head["num_samples"]), int(head["num_tokens"])
    for name, expected in (("tokens.bin", 4 * num_tokens), ("targets.bin", num_tokens)):
        found = (folder / name).stat().st_size
        if found != expected:
            raise DataError(
                f"the prepared data is damaged: {name} has {found:,} bytes instead of {expected:,}",
                where=str(folder),
                hint="remove the folder; it is made anew at the next start",
            )
    index = np.load(folder / "index.npy", mmap_mode="r")
    lengths, num_targets, record = (np.asarray(row) for row in index)
    return Store(
        folder=folder,
        key=str(head["key"]),
        lengths=lengths,
        num_targets=num_targets,
        record=record,
        _starts=np.concatenate([[0], np.cumsum(lengths[:-1])]).astype(np.int64) if num_samples else lengths,
        _ids=np.memmap(folder / "tokens.bin", np.int32, mode="r") if num_tokens else np.zeros(0, np.int32),
        _is_target=np.memmap(folder / "targets.bin", np.bool_, mode="r") if num_tokens else np.zeros(0, np.bool_),
    )


class StoreWriter:
    """Append samples to a new store; it is complete once the ``with`` block ends without an error."""

    def __init__(self, folder: Path, key: str) -> None:
        folder.mkdir()
        self.folder = folder
        self.key = key
        self.num_tokens = 0
        self._index: list[tuple[int, int, int]] = []
        self._tokens = (folder / "tokens.bin").open("wb")
        self._targets = (folder / "targets.bin").open("wb")

    def __len__(self) -> int:
        """Count the samples written so far."""
        return len(self._index)

    def append(self, ids: Ids, is_target: Flags, record: int) -> None:
        """Write one sample: int32 and bool ``[tokens]``."""
        self._tokens.write(ids.astype("<i4", copy=False).tobytes())
        self._targets.write(is_target.astype(np.bool_, copy=False).tobytes())
        self._index.append((len(ids), int(is_target.sum()), record))
        self.num_tokens += len(ids)

    def __enter__(self) -> StoreWriter:
        """Return the writer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Flush everything to disk, ``store.json`` last; after an error only close."""
        if kind is None:
            with (self.folder / "index.npy").open("wb") as file:
                np.save(file, np.array(self._index, np.int64).reshape(-1, 3).T.copy())
                file.flush()
                os.fsync(file.fileno())
            for file in (self._tokens, self._targets):
                file.flush()
                os.fsync(file.fileno())
        self._tokens.close()
        self._targets.close()
        if kind is None:
            head = {
                "version": STORE_VERSION,
                "key": self.key,
                "num_samples": len(self._index),
                "num_tokens": self.num_tokens,
            }
            write_synced(self.folder / "store.json", orjson.dumps(head))
            sync(self.folder)
