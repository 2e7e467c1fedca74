"""Samples read while training, from files that are not prepared first (``data.mode: stream``).

Every rank reads all files and keeps its own share: text is so small beside the work of training on it that nothing is
saved by sharing the reading, and all ranks then agree on every update without exchanging a word. So what holds of
prepared data holds here: the samples of an update are a function of (files, seed, epoch, update, global batch) alone,
an epoch has every record exactly once, and its last update is the rest.

With ``data.shuffle`` the files of an epoch come in a new order, and ``data.shuffle_window`` records at a time are
shuffled among themselves. A position in the stream is a few numbers; they travel with each update and are kept in the
checkpoint. Going on from one reads at most one file up to its place, and one window.

Files must stay as they are while they are streamed. Each is looked at before and after it is read, and one that was
changed is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from unisono.data.block import Block, BlockEncoder, Encoded
from unisono.data.feistel import permuted
from unisono.data.job import Job, LeftOut
from unisono.data.loader import Batches, LeftOutRecord, UpdateBatch
from unisono.data.records import Shape, recognise
from unisono.data.source.files import SourceFile
from unisono.data.source.raw import Raw, parse
from unisono.data.source.read import read_records
from unisono.data.store import Flags, Ids, TokenStore
from unisono.data.template import load_tokenizer
from unisono.errors import DataError

RECORDS_OF_A_FILE = 2**32  # a record's id is its file's place times this, and its own place in the file
_CHUNK_RECORDS = 64
_FILES, _WINDOW = 2, 3  # what a permutation is of; an order of prepared samples has 0 and 1


@dataclass(frozen=True)
class StreamPlan:
    """What is to be streamed: the job over all files, the shape of each file's records, each file's version."""

    job: Job
    shapes: tuple[Shape, ...]
    versions: tuple[str | None, ...]
    key: str
    messages: tuple[str, ...]


@dataclass(frozen=True)
class Cursor:
    """How far a stream has been read: the window's beginning, and what of the window is used.

    file: place among the epoch's files in their order. record: records of that file before the window. window: its
    number in the epoch. used: records of the window that are used up. pieces: samples used of the next record.
    """

    epoch: int = 0
    file: int = 0
    record: int = 0
    window: int = 0
    used: int = 0
    pieces: int = 0
    num_skipped: int = 0
    num_samples: int = 0  # of this epoch so far


@dataclass(frozen=True, eq=False)
class _Sample:
    ids: Ids
    is_target: Flags
    record: int


@dataclass(frozen=True)
class _Entry:
    """A record of a window, with its file's place in the job, its place in the file, and its id."""

    file: int
    raw: Raw
    record: int


def plan(files_by_source: Sequence[tuple[str, tuple[SourceFile, ...]]], job: Job, key: str) -> StreamPlan:
    """Look at the first record of each source; DataError when it is of no known shape or there is none."""
    shapes: list[Shape] = []
    messages: list[str] = []
    versions = tuple(file.first_version() for file in job.files)
    for name, files in files_by_source:
        shape = job.shape if job.shape != "auto" else _first_shape(files, dict(job.fields))
        shapes += [shape] * len(files)
        how = "recognised from the first record" if job.shape == "auto" else "as asked"
        messages.append(
            f"train {name}".rstrip() + f": {len(files)} file(s) streamed, records of the shape {shape} ({how})"
        )
    return StreamPlan(job, tuple(shapes), versions, key, tuple(messages))


def _first_shape(files: tuple[SourceFile, ...], fields: dict[str, str]) -> Shape:
    problem = ""
    for file in files:
        for raw in read_records(file):
            where = f"{file.name}:{raw.place}"
            parsed = parse(raw)
            if parsed.value is not None:
                return recognise(parsed.value, where, fields)
            problem = problem or f"; the first one: {where}: {parsed.problem}"
    places = ", ".join(file.name for file in files)
    raise DataError(f"no record that is a JSON object: 0 samples{problem}", where=places)


class Stream:
    """The samples from a position on, epoch after epoch, without an end."""

    def __init__(self, plan: StreamPlan, *, seed: int, shuffle: bool, window: int) -> None:
        self._plan = plan
        self._seed = seed
        self._shuffle = shuffle
        self._window = window
        job = plan.job
        self._encode = BlockEncoder(job, load_tokenizer(job.tokenizer_dir, trust_remote_code=job.trust_remote_code))

    def samples(self, cursor: Cursor) -> Iterator[tuple[_Sample | None, Cursor, list[LeftOutRecord]]]:
        """Yield each sample with the position after it, and what was left out before it; None ends an epoch.

        DataError for a record that cannot be used, as ``data.on_error`` says, and for an epoch without a sample.
        """
        while True:
            left_out: list[LeftOutRecord] = []
            for start, entries in self._windows(cursor):
                cursor = replace(start, num_skipped=cursor.num_skipped, num_samples=cursor.num_samples)
                for sample, after, gone in self._samples_of(entries, cursor):
                    cursor = after
                    left_out += gone
                    if sample is not None:
                        yield sample, cursor, left_out
                        left_out = []
            if cursor.num_samples == 0:
                raise DataError(
                    "a whole epoch gave no sample: every record was left out",
                    where=", ".join(file.name for file in self._plan.job.files),
                    hint="data.max_length, data.format and data.targets decide; `unisono data show` on one file tells",
                )
            cursor = Cursor(epoch=cursor.epoch + 1, num_skipped=cursor.num_skipped)
            yield None, cursor, left_out

    def _windows(self, cursor: Cursor) -> Iterator[tuple[Cursor, list[_Entry]]]:
        """Yield the epoch's windows from a position on: where each begins, and its records in the order of the file.

        The first one comes with what is used of it.
        """
        entries = self._entries(cursor)
        while window := list(islice(entries, self._window)):
            yield cursor, [entry for _, _, entry in window]
            file, record, _ = window[-1]
            cursor = replace(cursor, file=file, record=record + 1, window=cursor.window + 1, used=0, pieces=0)

    def _entries(self, cursor: Cursor) -> Iterator[tuple[int, int, _Entry]]:
        """Yield an epoch's records from a window on, each with its file's place in the order and its own there."""
        files = self._plan.job.files
        order = np.arange(len(files))
        if self._shuffle:
            order = permuted(order, len(files), self._seed, _FILES, cursor.epoch)
        for place in range(cursor.file, len(files)):
            number = int(order[place])
            skipped = cursor.record if place == cursor.file else 0
            self._check_unchanged(number)
            for record, raw in enumerate(islice(read_records(files[number]), skipped, None), skipped):
                yield place, record, _Entry(number, raw, number * RECORDS_OF_A_FILE + record)
            self._check_unchanged(number)

    def _check_unchanged(self, number: int) -> None:
        """Refuse a file that is not as it was: another rank, or another epoch, would have other records of it."""
        file = self._plan.job.files[number]
        if file.version() != self._plan.versions[number]:
            raise DataError(
                "the file was changed while the run streams it",
                where=file.name,
                hint="a stream needs files that stay as they are: copy them, or prepare them with data.mode=store",
            )

    def _samples_of(
        self, window: list[_Entry], cursor: Cursor
    ) -> Iterator[tuple[_Sample | None, Cursor, list[LeftOutRecord]]]:
        """Yield a window's samples from ``cursor.used`` on, in their shuffled order; None for a record left out."""
        places = np.arange(len(window))
        if self._shuffle:
            places = permuted(places, len(window), self._seed, _WINDOW, cursor.epoch, cursor.window)
        entries = [window[place] for place in places.tolist()]
        while cursor.used < len(entries):
            chunk = self._chunk(entries, cursor.used)
            encoded = self._encoded(chunk)
            gone = {(item.file, item.place): item for item in encoded.left_out}
            errors = dict(zip([key for key, item in gone.items() if item.kind == "bad"], encoded.bad))
            for entry, samples in zip(chunk, _by_record(encoded, len(chunk))):
                key = (entry.file, entry.raw.place)
                if key in gone:
                    cursor = replace(cursor, used=cursor.used + 1)
                    cursor = self._leave_out(gone[key], errors.get(key), cursor)
                    record = LeftOutRecord(gone[key].at(self._plan.job), gone[key].reason)
                    yield None, cursor, [record] if cursor.epoch == 0 else []  # every epoch has the same ones
                for piece in range(cursor.pieces, len(samples)):
                    is_last = piece + 1 == len(samples)
                    cursor = replace(
                        cursor,
                        used=cursor.used + is_last,
                        pieces=0 if is_last else piece + 1,
                        num_samples=cursor.num_samples + 1,
                    )
                    yield _Sample(*samples[piece], entry.record), cursor, []

    def _chunk(self, entries: list[_Entry], at: int) -> list[_Entry]:
        """Return the next entries that have one shape."""
        shapes = self._plan.shapes
        end = at + 1
        while end < min(len(entries), at + _CHUNK_RECORDS) and shapes[entries[end].file] == shapes[entries[at].file]:
            end += 1
        return entries[at:end]

    def _encoded(self, chunk: list[_Entry]) -> Encoded:
        shape = self._plan.shapes[chunk[0].file]
        return self._encode(Block(0, shape, [(entry.file, entry.raw) for entry in chunk]))

    def _leave_out(self, item: LeftOut, error: DataError | None, cursor: Cursor) -> Cursor:
        """Count a record that is left out, or refuse it; the first epoch counts the bad ones."""
        job = self._plan.job
        if error is not None and job.on_error == "stop":
            raise error
        if item.kind == "overlong" and job.overlong == "error":
            raise DataError(
                item.reason,
                where=item.at(job),
                hint="raise data.max_length, shorten it, or set data.overlong=drop",
            )
        if error is None or cursor.epoch > 0:
            return cursor
        if cursor.num_skipped == job.max_skipped:
            raise DataError(
                f"more than data.max_skipped = {job.max_skipped} records cannot be used; the last one: {error}",
                hint="mend the files or raise data.max_skipped",
            )
        return replace(cursor, num_skipped=cursor.num_skipped + 1)


def _by_record(encoded: Encoded, count: int) -> list[list[tuple[Ids, Flags]]]:
    """Take a piece apart: the samples of each of the block's records."""
    (piece,) = encoded.pieces
    samples: list[list[tuple[Ids, Flags]]] = [[] for _ in range(count)]
    end = np.cumsum(piece.index[:, 0])
    for (length, _, record), stop in zip(piece.index.tolist(), end.tolist()):
        samples[record].append((piece.ids[stop - length : stop], piece.is_target[stop - length : stop]))
    return samples


class _Listed:
    """The samples of one update, as a store."""

    key = ""

    def __init__(self, samples: list[_Sample]) -> None:
        self._samples = samples
        self.lengths = np.array([len(sample.ids) for sample in samples], np.int64)
        self.num_targets = np.array([np.count_nonzero(sample.is_target) for sample in samples], np.int64)
        self.record = np.array([sample.record for sample in samples], np.int64)
        self.num_tokens = int(self.lengths.sum())
        self.longest = int(self.lengths.max())

    def __len__(self) -> int:
        return len(self._samples)

    def sample(self, index: int) -> tuple[Ids, Flags]:
        return self._samples[index].ids, self._samples[index].is_target


class StreamedUpdates:
    """Builds a rank's part of one update after the other, each of ``global_size`` samples or the rest of an epoch."""

    def __init__(
        self,
        stream: Stream,
        batches_of: Callable[[TokenStore], Batches],
        *,
        global_size: int,
        position: dict[str, Any] | None,
    ) -> None:
        self._batches_of = batches_of
        self._global_size = global_size
        self._samples = stream.samples(Cursor(**(position or {})))

    def __call__(self, number: int) -> UpdateBatch:
        """Build the next update; ``number`` is its name."""
        taken: list[_Sample] = []
        left_out: list[LeftOutRecord] = []
        epoch, after = 0, Cursor()
        for sample, after, gone in self._samples:
            left_out += gone
            if sample is None and taken:
                break
            if sample is not None:
                epoch = after.epoch
                taken.append(sample)
            if len(taken) == self._global_size:
                break
        batch = self._batches_of(_Listed(taken)).build(number, epoch, np.arange(len(taken)))
        return replace(batch, position=asdict(after), left_out=left_out)
