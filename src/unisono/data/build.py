"""From files to a store: read, recognise, convert, tokenise, account for every record.

Every record ends in exactly one of: kept, longer than allowed, without a target, bad. What is not kept is counted and
named with its file and line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import orjson

from unisono.data.encode import Encoder, Overlong, Tokens
from unisono.data.read import read_records
from unisono.data.records import Conversation, Shape, Text, content_share, convert, ignored_fields, recognise
from unisono.data.store import StoreWriter
from unisono.data.template import load_tokenizer
from unisono.durable import sync, write_synced
from unisono.errors import DataError

NUM_NAMED = 20
PROGRESS_SECONDS = 2.0
_BATCH_RECORDS = 500
_BATCH_CHARACTERS = 1_000_000


@dataclass(frozen=True)
class Job:
    """What is to be prepared: everything that the result depends on."""

    files: tuple[Path, ...]
    shape: Literal["auto"] | Shape
    max_length: int
    overlong: Literal["drop", "error"]
    on_error: Literal["stop", "skip"]
    max_skipped: int
    validation_share: float
    tokenizer_dir: Path
    trust_remote_code: bool


@dataclass(frozen=True)
class Counts:
    """Where the records went: ``records`` is the sum of kept, the two dropped and skipped.

    ``kept``, ``tokens``, ``targets`` cover training and validation part together; ``dropped_tokens`` is what the
    dropped ones had (a lower bound: huge ones are not tokenised); ``open_answers`` are answers to which the chat
    template gives no end marker.
    """

    records: int = 0
    kept: int = 0
    kept_validation: int = 0
    dropped_overlong: int = 0
    dropped_no_target: int = 0
    skipped_bad: int = 0
    tokens: int = 0
    targets: int = 0
    dropped_tokens: int = 0
    open_answers: int = 0

    def sentence(self) -> str:
        """Say in one line what became of the records."""
        lost = self.dropped_overlong + self.dropped_no_target
        parts = [f"{self.records:,} records: {self.kept:,} kept, {lost:,} dropped"]
        reasons = [
            f"{count:,} {why}"
            for count, why in (
                (self.dropped_overlong, "longer than data.max_length"),
                (self.dropped_no_target, "without a target"),
            )
            if count
        ]
        if reasons:
            parts[0] += f" ({', '.join(reasons)})"
        if self.skipped_bad:
            parts.append(f"{self.skipped_bad:,} skipped as bad")
        return ", ".join(parts)


@dataclass(frozen=True)
class LeftOut:
    """A record that is not in the store: which file of the job, which line, why."""

    file: int
    line: int
    reason: str


@dataclass
class _Tally:
    counts: dict[str, int] = field(default_factory=lambda: asdict(Counts()))
    left_out: list[LeftOut] = field(default_factory=list)
    bad: list[DataError] = field(default_factory=list)
    ignored: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Entry:
    number: int
    file: int
    line: int
    record: Conversation | Text


def build(job: Job, folder: Path, key: str, progress: Callable[[str], None]) -> None:
    """Write the stores ``train`` and (with a share) ``validation``, ``left_out.jsonl`` and ``prepared.json``.

    DataError when a record cannot be used and ``on_error`` is stop, when more than ``max_skipped`` are skipped, when
    one is too long and ``overlong`` is error, when nothing is left.
    """
    stamps = [_stamp(path) for path in job.files]
    names = ["train", "validation"] if job.validation_share else ["train"]
    tally = _Tally()
    shape = first_shape(job)
    encoder = Encoder(load_tokenizer(job.tokenizer_dir, trust_remote_code=job.trust_remote_code), shape, job.max_length)
    with ExitStack() as stack:
        writers = [stack.enter_context(StoreWriter(folder / name, key)) for name in names]
        for batch in _batches(_entries(job, shape, tally, Progress(job.files, progress))):
            for entry, result in zip(batch, encoder.encode([entry.record for entry in batch])):
                _settle(job, entry, result[0] if isinstance(result, tuple) else result, writers, tally)
        for path, stamp in zip(job.files, stamps):
            if _stamp(path) != stamp:
                raise DataError("the file was changed while it was read", where=str(path), hint="start again")
        _judge(job, tally, [len(writer) for writer in writers])
    lines = [orjson.dumps({"place": f"{job.files[x.file]}:{x.line}", "reason": x.reason}) for x in tally.left_out]
    write_synced(folder / "left_out.jsonl", b"".join(line + b"\n" for line in lines))
    summary = {
        "key": key,
        "shape": shape,
        "counts": tally.counts,
        "left_out": [asdict(x) for x in tally.left_out[:NUM_NAMED]],
        "num_left_out": len(tally.left_out),
        "ignored": sorted(tally.ignored)[:NUM_NAMED],
        "stores": names,
    }
    write_synced(folder / "prepared.json", orjson.dumps(summary))
    sync(folder)


def first_shape(job: Job) -> Shape:
    """Return the shape that is asked for, or recognise that of the first readable record."""
    if job.shape != "auto":
        return job.shape
    first = ""
    for path in job.files:
        for raw in read_records(path):
            if raw.value is not None:
                return recognise(raw.value, f"{path}:{raw.line}")
            first = first or f"; the first one: {path}:{raw.line}: {raw.problem}"
    places = ", ".join(map(str, job.files))
    raise DataError(f"no record that is a JSON object: 0 samples{first}", where=places)


def _entries(job: Job, shape: Shape, tally: _Tally, progress: Progress) -> Iterator[_Entry]:
    """Yield every record that can be converted, with its place; put down the others as bad."""
    number = -1
    for index, path in enumerate(job.files):
        for raw in read_records(path):
            number += 1
            tally.counts["records"] += 1
            progress.at(index, raw.end_bytes, number + 1)
            where = f"{path}:{raw.line}"
            try:
                if raw.value is None:
                    raise DataError(raw.problem, where=where)
                record = convert(raw.value, shape, where)
            except DataError as error:
                _put_down_bad(job, index, raw.line, error, tally)
                continue
            tally.ignored |= ignored_fields(raw.value, shape)
            yield _Entry(number, index, raw.line, record)


def _batches(entries: Iterator[_Entry]) -> Iterator[list[_Entry]]:
    """Group records for the tokenizer, so that a batch needs a bounded amount of memory."""
    batch: list[_Entry] = []
    num_characters = 0
    for entry in entries:
        batch.append(entry)
        record = entry.record
        texts = [record.text] if isinstance(record, Text) else [message.content for message in record.messages]
        num_characters += sum(map(len, texts))
        if len(batch) >= _BATCH_RECORDS or num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    if batch:
        yield batch


def _settle(
    job: Job, entry: _Entry, result: Tokens | Overlong | DataError, writers: list[StoreWriter], tally: _Tally
) -> None:
    """Write a record's tokens or put down why there are none."""
    counts = tally.counts
    if isinstance(result, DataError):
        _put_down_bad(job, entry.file, entry.line, result, tally)
    elif isinstance(result, Overlong):
        about = "" if result.exact else "more than "
        reason = f"{about}{result.num_tokens:,} tokens, and data.max_length is {job.max_length:,}"
        counts["dropped_overlong"] += 1
        counts["dropped_tokens"] += result.num_tokens
        tally.left_out.append(LeftOut(entry.file, entry.line, reason))
    elif not result.is_target.any():
        counts["dropped_no_target"] += 1
        counts["dropped_tokens"] += len(result.ids)
        tally.left_out.append(LeftOut(entry.file, entry.line, "no target: nothing in it is predicted"))
    else:
        is_validation = job.validation_share > 0 and content_share(entry.record) < job.validation_share
        writers[is_validation].append(result.ids, result.is_target, entry.number)
        counts["kept"] += 1
        counts["kept_validation"] += is_validation
        counts["tokens"] += len(result.ids)
        counts["targets"] += int(result.is_target.sum())
        counts["open_answers"] += result.num_open_answers


def _put_down_bad(job: Job, file: int, line: int, error: DataError, tally: _Tally) -> None:
    tally.counts["skipped_bad"] += 1
    if job.on_error == "stop":
        tally.bad.append(error)
        return
    tally.left_out.append(LeftOut(file, line, error.message))
    if tally.counts["skipped_bad"] > job.max_skipped:
        last = [f"{job.files[x.file]}:{x.line}: {x.reason}" for x in tally.left_out[-NUM_NAMED:]]
        raise DataError(
            f"more than data.max_skipped = {job.max_skipped} records cannot be used; the last ones:\n  "
            + "\n  ".join(last),
            hint="mend the files or raise data.max_skipped",
        )


def _judge(job: Job, tally: _Tally, num_samples: list[int]) -> None:
    """Refuse what must not be published: bad records in strict mode, overlong ones if asked, an empty result."""
    if len(tally.bad) == 1:
        raise tally.bad[0]
    if tally.bad:
        raise DataError(
            f"{len(tally.bad):,} of {tally.counts['records']:,} records cannot be used:\n  "
            + "\n  ".join(f"{error.where}: {error.message}" for error in tally.bad[:NUM_NAMED])
            + (f"\n  ... and {len(tally.bad) - NUM_NAMED:,} more" if len(tally.bad) > NUM_NAMED else ""),
            hint=f"{tally.bad[0].hint or 'mend them'}; data.on_error=skip leaves out up to data.max_skipped records",
        )
    counts = Counts(**tally.counts)
    files = ", ".join(map(str, job.files))
    if counts.dropped_overlong and job.overlong == "error":
        named = [f"{job.files[x.file]}:{x.line}: {x.reason}" for x in tally.left_out if "data.max_length" in x.reason]
        raise DataError(
            f"{counts.dropped_overlong:,} of {counts.records:,} records are too long:\n  "
            + "\n  ".join(named[:NUM_NAMED])
            + (f"\n  ... and {len(named) - NUM_NAMED:,} more" if len(named) > NUM_NAMED else ""),
            hint="raise data.max_length, shorten them, or set data.overlong=drop",
        )
    if counts.kept == 0:
        raise DataError(
            f"no sample is left after filtering: {counts.sentence()}; 0 samples",
            where=files,
            hint=f"data.max_length is {job.max_length:,}" if counts.dropped_overlong else None,
        )
    if 0 in num_samples:
        part = "validation" if num_samples[0] else "training"
        raise DataError(
            f"data.validation = {job.validation_share} of {counts.kept:,} samples leaves none for {part}",
            where=files,
            hint="choose another share or name validation files",
        )


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


class Progress:
    """Say every few seconds how far the files have been read; silent for short work."""

    def __init__(self, files: tuple[Path, ...], say: Callable[[str], None]) -> None:
        sizes = [path.stat().st_size for path in files]
        self._before = [sum(sizes[:i]) for i in range(len(sizes))]
        self._total = max(1, sum(sizes))
        self._say = say
        self._began = self._spoke = time.monotonic()

    def at(self, file: int, num_bytes: int, num_records: int) -> None:
        """Note that a file has been read up to a byte."""
        now = time.monotonic()
        if now - self._spoke >= PROGRESS_SECONDS:
            self._spoke = now
            share = (self._before[file] + num_bytes) / self._total
            rate = num_records / (now - self._began)
            self._say(f"preparing data: {share:.0%}, {num_records:,} records, {rate:,.0f} records/s")
