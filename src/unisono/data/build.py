"""From files to a store: read and hashed in one pass, encoded on all cores, every record accounted for.

What is done is marked on disk every few seconds, so that a job that was killed goes on from there. What is not kept
is counted, and named with its file and place in ``left_out.jsonl``.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson

from unisono.data.block import Block, Encoded
from unisono.data.job import Counts, Job, LeftOut
from unisono.data.pool import encoding
from unisono.data.progress import Progress
from unisono.data.records import Shape, recognise
from unisono.data.source.raw import Raw, parse
from unisono.data.source.read import read_records
from unisono.data.store import Mark, StoreWriter, write_summary
from unisono.durable import open_at, sync, write_synced
from unisono.errors import DataError

NUM_NAMED = 20
MARK_SECONDS = 10.0
SMALL_BYTES = 32 * 2**20  # less is encoded in this process, before another one had started
_BLOCK_RECORDS = 1000
_BLOCK_BYTES = 2_000_000
_HOPELESS_RECORDS = 1000
_HOPELESS_SECONDS = 10.0
_PROGRESS_FILE = "progress.json"


@dataclass
class _Tally:
    """What has been counted so far; the first few of what is left out are kept by name."""

    shape: Shape | None = None
    counts: Counts = Counts()  # noqa: RUF009 - frozen
    named: list[LeftOut] = field(default_factory=list)
    bad: list[DataError] = field(default_factory=list)
    ignored: set[str] = field(default_factory=set)
    marks: list[Mark] = field(default_factory=list)
    left_out_bytes: int = 0

    def add(self, encoded: Encoded) -> None:
        self.counts += encoded.counts
        self.ignored |= encoded.ignored
        self.bad += encoded.bad[: max(0, NUM_NAMED - len(self.bad))]
        for item in encoded.left_out:
            if sum(other.kind == item.kind for other in self.named) < NUM_NAMED:
                self.named.append(item)


def build(
    job: Job,
    folder: Path,
    key_of: Callable[[list[str]], str],
    *,
    stamps: list[str | None],
    num_workers: int,
    preload: bool,
    progress: Callable[[str], None],
) -> tuple[str, list[str]]:
    """Write the stores ``train`` and (with a share) ``validation``, ``left_out.jsonl`` and ``prepared.json``.

    ``key_of`` makes the key from the files' hashes, which are known once they have been read; returns both. Goes on
    with what an earlier call had marked in ``folder``, of the files as they were under ``stamps``. DataError when a
    record cannot be used and ``on_error`` is stop, when more than ``max_skipped`` are skipped, when one is too long and
    ``overlong`` is error, when nothing is left, when a file is not as it was.
    """
    names = ["train", "validation"] if job.validation_share else ["train"]
    tally = _restore(folder, names)
    if tally.counts.records:
        progress(f"preparing data: going on after the {tally.counts.records:,} records that were done before")
    sizes = [file.num_bytes for file in job.files]
    is_small = None not in sizes and sum(size or 0 for size in sizes) < SMALL_BYTES
    reading = _Reading(job, stamps, tally, Progress(sizes, progress), folder)
    with ExitStack() as stack:
        writers = [stack.enter_context(StoreWriter(folder / name, at)) for name, at in zip(names, tally.marks)]
        left_out = stack.enter_context(open_at(folder / "left_out.jsonl", tally.left_out_bytes))
        encode = stack.enter_context(encoding(job, 1 if is_small else num_workers, preload=preload))
        marked, hopeless_since = time.monotonic(), float("inf")
        for encoded in encode(reading.blocks()):
            tally.add(encoded)
            for writer, piece in zip(writers, encoded.pieces):
                writer.append(piece)
            for item in encoded.left_out:
                place = f"{job.files[item.file].name}:{item.place}"
                left_out.write(orjson.dumps({"place": place, "reason": item.reason}) + b"\n")
            now = time.monotonic()
            num_hopeless = _num_hopeless(job, tally)
            hopeless_since = min(hopeless_since, now) if num_hopeless else hopeless_since
            if num_hopeless >= _HOPELESS_RECORDS or now - hopeless_since > _HOPELESS_SECONDS:
                _judge(job, tally, [len(writer) for writer in writers])
            if now - marked > MARK_SECONDS and not num_hopeless:
                left_out.flush()
                tally.left_out_bytes = left_out.tell()
                _mark(folder, tally, writers)
                marked = now
        reading.done()
        _judge(job, tally, [len(writer) for writer in writers])
        key = key_of(reading.hashes)
        for writer in writers:
            writer.finish(key, tally.counts.records)
    sync(folder / "left_out.jsonl")
    _summarise(folder, key, reading.hashes, names, tally)
    return key, reading.hashes


class _Reading:
    """Reads the files of a job as blocks; knows their hashes once all are read."""

    def __init__(self, job: Job, stamps: list[str | None], tally: _Tally, bar: Progress, scratch: Path) -> None:
        self._job = job
        self._stamps = stamps
        self._tally = tally
        self._bar = bar
        self._scratch = scratch
        self._problem = ""
        self.hashes: list[str] = []

    def blocks(self) -> Iterator[Block]:
        """Yield every record once, those that were done before left out; DataError when a file changes meanwhile."""
        skipped = self._tally.counts.records
        number, num_bytes, entries = 0, 0, list[tuple[int, Raw]]()
        for index, file in enumerate(self._job.files):
            digest = hashlib.sha256()
            for raw in read_records(file, digest, scratch=self._scratch):
                number += 1
                self._bar.at(index, raw.end_bytes, number, skipped=skipped)
                if number <= skipped:
                    continue
                if self._tally.shape is None:
                    self._tally.shape = self._recognise(raw, f"{file.name}:{raw.place}")
                entries.append((index, raw))
                num_bytes += len(raw.text if raw.text is not None else repr(raw.value))
                if len(entries) >= _BLOCK_RECORDS or num_bytes >= _BLOCK_BYTES:
                    yield Block(number - len(entries), self._tally.shape, entries)
                    num_bytes, entries = 0, []
            if file.stamp() != self._stamps[index]:
                raise DataError("the file was changed while it was read", where=file.name, hint="start again")
            self.hashes.append(digest.hexdigest())
        if entries:
            yield Block(number - len(entries), self._tally.shape, entries)

    def _recognise(self, raw: Raw, where: str) -> Shape | None:
        """Return the shape that is asked for, or recognise that of the first readable record."""
        if self._job.shape != "auto":
            return self._job.shape
        parsed = parse(raw)
        if parsed.value is not None:
            return recognise(parsed.value, where, dict(self._job.fields))
        self._problem = self._problem or f"; the first one: {where}: {parsed.problem}"
        return None

    def done(self) -> None:
        """Close the progress line; DataError when there was no record at all."""
        self._bar.done()
        if self._tally.shape is None:
            places = ", ".join(file.name for file in self._job.files)
            what = "no record that is a JSON object" if self._problem else "there is no record"
            raise DataError(f"{what}: 0 samples{self._problem}", where=places)


def _num_hopeless(job: Job, tally: _Tally) -> int:
    """Count what will have to be refused at the end; once it is something, reading on is only for the list."""
    bad = tally.counts.skipped_bad if job.on_error == "stop" else 0
    return bad + (tally.counts.dropped_overlong if job.overlong == "error" else 0)


def _judge(job: Job, tally: _Tally, num_samples: list[int]) -> None:
    """Refuse what must not be published: bad records in strict mode, overlong ones if asked, an empty result."""
    counts = tally.counts
    if job.on_error == "stop" and tally.bad:
        raise _bad_records(counts, tally.bad)
    if counts.skipped_bad > job.max_skipped:
        last = [item.line(job) for item in tally.named if item.kind == "bad"]
        raise DataError(
            f"more than data.max_skipped = {job.max_skipped} records cannot be used:\n  " + "\n  ".join(last),
            hint="mend the files or raise data.max_skipped",
        )
    if counts.dropped_overlong and job.overlong == "error":
        named = [item.line(job) for item in tally.named if item.kind == "overlong"]
        raise DataError(
            f"{counts.dropped_overlong:,} of {counts.records:,} records are too long:\n  "
            + "\n  ".join(named)
            + _more(counts.dropped_overlong),
            hint="raise data.max_length, shorten them, or set data.overlong=drop",
        )
    files = ", ".join(file.name for file in job.files)
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


def _bad_records(counts: Counts, bad: list[DataError]) -> DataError:
    if counts.skipped_bad == 1:
        return bad[0]
    return DataError(
        f"{counts.skipped_bad:,} of {counts.records:,} records cannot be used:\n  "
        + "\n  ".join(f"{error.where}: {error.message}" for error in bad)
        + _more(counts.skipped_bad),
        hint=f"{bad[0].hint or 'mend them'}; data.on_error=skip leaves out up to data.max_skipped records",
    )


def _more(count: int) -> str:
    return f"\n  ... and {count - NUM_NAMED:,} more" if count > NUM_NAMED else ""


def _mark(folder: Path, tally: _Tally, writers: list[StoreWriter]) -> None:
    """Put on disk how far the work has come, by one rename."""
    tally.marks = [writer.mark() for writer in writers]
    sync(folder / "left_out.jsonl")
    state = {
        "shape": tally.shape,
        "counts": asdict(tally.counts),
        "named": [asdict(item) for item in tally.named],
        "ignored": sorted(tally.ignored),
        "marks": [asdict(mark) for mark in tally.marks],
        "left_out_bytes": tally.left_out_bytes,
    }
    write_synced(folder / f".{_PROGRESS_FILE}", orjson.dumps(state))
    (folder / f".{_PROGRESS_FILE}").replace(folder / _PROGRESS_FILE)
    sync(folder)


def _restore(folder: Path, names: list[str]) -> _Tally:
    """Return what an earlier call has marked; without a mark, or the files that it speaks of, the folder is emptied."""
    try:
        state = orjson.loads((folder / _PROGRESS_FILE).read_bytes())
        tally = _Tally(
            shape=state["shape"],
            counts=Counts(**state["counts"]),
            named=[LeftOut(**item) for item in state["named"]],
            ignored=set(state["ignored"]),
            marks=[Mark(**mark) for mark in state["marks"]],
            left_out_bytes=state["left_out_bytes"],
        )
        is_whole = (folder / "left_out.jsonl").stat().st_size >= tally.left_out_bytes
        if is_whole and all(mark.is_within(folder / name) for mark, name in zip(tally.marks, names, strict=True)):
            return tally
    except (FileNotFoundError, NotADirectoryError, orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return _Tally(marks=[Mark()] * len(names))


def _summarise(folder: Path, key: str, hashes: list[str], names: list[str], tally: _Tally) -> None:
    """Write what a later start wants to say about the data; the mark of unfinished work goes."""
    summary = {
        "key": key,
        "hashes": hashes,
        "shape": tally.shape,
        "counts": asdict(tally.counts),
        "left_out": [asdict(item) for item in tally.named[:NUM_NAMED]],
        "num_left_out": tally.counts.num_left_out,
        "ignored": sorted(tally.ignored)[:NUM_NAMED],
        "stores": names,
    }
    write_summary(folder, summary)
    (folder / _PROGRESS_FILE).unlink(missing_ok=True)
    sync(folder)
