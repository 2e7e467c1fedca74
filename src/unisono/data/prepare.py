"""Prepare the data once: find it by its content, or make it under a lock and publish it by one rename.

A prepared store is found by a key: a hash over the content of the data files, of the tokenizer's files and of every
setting that matters. A file's hash is known from earlier by its stamp, or comes out of the one pass that prepares it.
Whoever does not find a store takes the lock of its request; the kernel frees the lock when its holder dies. The holder
writes under a private name, syncs, renames; the others wait and say for whom. So any number of processes and jobs may
call ``prepare`` at once, and the next one goes on where one was killed.

When the store exists, neither torch nor transformers is imported, and no data file is read.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, cast

import orjson

from unisono.config.schema import DataSection, sources_of, validation_sets_of
from unisono.cores import usable_cores
from unisono.data.build import build
from unisono.data.digests import Digests
from unisono.data.job import Counts, Job, LeftOut
from unisono.data.source.files import expand
from unisono.data.store import STORE_VERSION, Joined, Store, TokenStore, open_store, read_summary
from unisono.data.stream import StreamPlan, plan
from unisono.durable import sync
from unisono.errors import DataError, ModelError, OutputError, TransferError, UnisonoError, UserError

FORMAT_VERSION = 2
NUM_SHOWN = 5
WAIT_NOTICE_SECONDS = 3.0
_POLL_SECONDS = 0.1
_TOKENIZER_FILES = (
    "tokenizer*.json",
    "tokenizer*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges*",
    "spiece.model",
    "*.tiktoken",
    "chat_template*",
    "additional_chat_templates/*",
    "config.json",
    "*.py",
)


@dataclass(frozen=True, eq=False)
class Part:
    """One source or validation set: what was asked for, where its stores lie, what became of its records.

    name: empty for the only one of a plain list. summary: what ``build`` has written down. With a share for validation
    a source has two stores, ``train`` and ``validation``; any other part has ``train`` alone.
    """

    kind: Literal["train", "validation"]
    name: str
    job: Job
    folder: Path
    summary: dict[str, Any]

    @property
    def counts(self) -> Counts:
        """Where the records went, of both stores together."""
        return Counts(**self.summary["counts"])

    @property
    def label(self) -> str:
        """What a person calls it: train, train web, validation ..."""
        return f"{self.kind} {self.name}".rstrip()

    @property
    def messages(self) -> list[str]:
        """Say what the records are, where they went, and which were left out."""
        return _messages(self)

    def store(self, name: str) -> Store:
        """Open one of the stores."""
        with _told(self.folder):
            return open_store(self.folder / name)


@dataclass(frozen=True, eq=False)
class Prepared:
    """Stores that are ready, where the records went, and lines for the person.

    train: the samples of all sources, one after the other, with ``sizes`` and ``weights`` of each; or what is to be
    streamed while training. validation: by the set's name, which is empty for the only set of a plain list or share.
    parts: the sources, then the validation sets; a stream has none of the former.
    """

    train: TokenStore | StreamPlan
    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    validation: dict[str, TokenStore]
    counts: Counts
    format: str
    messages: tuple[str, ...]
    parts: tuple[Part, ...] = ()

    @property
    def store(self) -> TokenStore:
        """The training samples; DataError for a stream, which has none ready."""
        if isinstance(self.train, StreamPlan):
            raise DataError(
                "the data is streamed, so nothing is known of all samples",
                where="data.mode",
                hint="data.mode=store prepares it; data.train=[one file] is enough to look at samples",
            )
        return self.train


def prepare(
    data: DataSection,
    tokenizer_dir: Path,
    *,
    max_length: int,
    trust_remote_code: bool = False,
    num_workers: int | None = None,
    preload: bool = True,
    progress: Callable[[str], None] = print,
) -> Prepared:
    """Return the token stores of a run, making those that do not exist yet, on all cores.

    preload: see ``data.pool``. Safe to call from any number of processes at once.
    DataError names file and line; ModelError is about the tokenizer.
    """
    share = data.validation if isinstance(data.validation, float) else 0.0
    cache = _Cache(Path(data.cache_dir).expanduser(), num_workers or usable_cores(), preload, progress)

    def part(kind: Literal["train", "validation"], name: str, files: list[str], validation_share: float) -> Part:
        job = make_job(
            data,
            files,
            tokenizer_dir,
            max_length,
            validation_share=validation_share,
            trust_remote_code=trust_remote_code,
        )
        folder, summary = cache.obtain(job)
        return Part(kind, name, job, folder, summary)

    sets = {name: part("validation", name, files, 0.0) for name, files in validation_sets_of(data).items()}
    validation: dict[str, TokenStore] = {name: found.store("train") for name, found in sets.items()}
    if data.mode == "stream":
        train = _plan_stream(data, tokenizer_dir, max_length, trust_remote_code=trust_remote_code)
        messages = (*train.messages, *(line for found in sets.values() for line in found.messages))
        return Prepared(train, (), (), validation, Counts(), ", ".join(dict.fromkeys(train.shapes)), messages)
    sources = {name: part("train", name, files, share) for name, files in sources_of(data).items()}
    stores = [source.store("train") for source in sources.values()]
    if share:
        validation = {name: source.store("validation") for name, source in sources.items()}
    return Prepared(
        train=stores[0] if len(stores) == 1 else Joined(stores),
        sizes=tuple(map(len, stores)),
        weights=tuple(data.weights.get(name, 1.0) for name in sources),
        validation=validation,
        counts=sum((source.counts for source in sources.values()), Counts()),
        format=", ".join(dict.fromkeys(str(source.summary["shape"]) for source in sources.values())),
        messages=tuple(line for found in (*sources.values(), *sets.values()) for line in found.messages),
        parts=(*sources.values(), *sets.values()),
    )


def _plan_stream(data: DataSection, tokenizer_dir: Path, max_length: int, *, trust_remote_code: bool) -> StreamPlan:
    """Look at the files of a stream; its key is of their names and sketches, since nobody has read them."""
    sources = [(name, expand(files)) for name, files in sources_of(data).items()]
    every = tuple(file for _, files in sources for file in files)
    job = replace(
        make_job(data, [], tokenizer_dir, max_length, validation_share=0.0, trust_remote_code=trust_remote_code),
        files=every,
    )
    contents = [[Path(file.name).name, file.num_bytes, file.sketch()] for file in every]
    return plan(sources, job, _key("stream", settings_of(job), contents, data.shuffle_window))


def make_job(
    data: DataSection,
    files: list[str],
    tokenizer_dir: Path,
    max_length: int,
    *,
    validation_share: float,
    trust_remote_code: bool,
) -> Job:
    """Say what is to be prepared of some files; DataError names all that cannot be read."""
    return Job(
        files=expand(files),
        shape=data.format,
        fields=tuple(sorted(data.fields.items())),
        targets=data.targets,
        max_length=max_length,
        overlong=data.overlong,
        on_error=data.on_error,
        max_skipped=data.max_skipped,
        validation_share=validation_share,
        tokenizer_dir=tokenizer_dir,
        trust_remote_code=trust_remote_code,
    )


def settings_of(job: Job) -> list[object]:
    """Return everything but the files that the prepared tokens depend on."""
    names = {path for pattern in _TOKENIZER_FILES for path in job.tokenizer_dir.glob(pattern) if path.is_file()}
    if not any(path.name.startswith(("tokenizer", "vocab", "spiece")) for path in names):
        raise ModelError("there is no tokenizer in the folder", where=str(job.tokenizer_dir))
    try:
        digests = [[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in sorted(names)]
    except OSError as error:
        raise ModelError(
            f"the tokenizer cannot be read: {error.strerror or error}", where=str(error.filename or job.tokenizer_dir)
        ) from error
    return [
        [FORMAT_VERSION, STORE_VERSION, version("transformers"), version("tokenizers"), version("jinja2")],
        digests,
        [job.shape, job.fields, job.targets, job.max_length, job.overlong, job.on_error, job.max_skipped],
        [job.validation_share, job.trust_remote_code],
    ]


def _key(*parts: object) -> str:
    return hashlib.sha256(orjson.dumps(parts)).hexdigest()[:32]


class _Cache:
    """The folder with prepared stores; finds them by content, makes those that are missing."""

    def __init__(self, folder: Path, num_workers: int, preload: bool, progress: Callable[[str], None]) -> None:
        self._stores = folder / "stores"
        self._digests = Digests(folder / "digests")
        self._num_workers = num_workers
        self._preload = preload
        self._progress = progress

    def obtain(self, job: Job) -> tuple[Path, dict[str, Any]]:
        """Return the folder of a job's stores and its summary, building them if they are not there."""
        settings = settings_of(job)
        try:
            self._stores.mkdir(parents=True, exist_ok=True)
            key = self._find(job, settings) or self._make_alone(job, settings)
        except BrokenPipeError:
            raise  # of the progress, not of the cache: nobody reads on, as with `| head`
        except OSError as error:
            raise OutputError(
                f"prepared data cannot be written: {error.strerror or error}",
                where=str(error.filename or self._stores),
                hint="data.cache_dir must be a folder with free space that can be written",
            ) from error
        folder = self._stores / key
        with _told(folder):
            return folder, read_summary(folder)

    def _find(self, job: Job, settings: list[object]) -> str | None:
        """Return the key of a finished store; None when a file's content is not known or nothing is there for it."""
        hashes = [self._digests.find(file, self._progress) for file in job.files]
        if None in hashes:
            return None
        key = _content_key(job, settings, cast(list[str], hashes))
        return key if (self._stores / key).is_dir() else None

    def _make_alone(self, job: Job, settings: list[object]) -> str:
        """Build while nobody else does; whoever waited looks again first."""
        stamps = [file.stamp() for file in job.files]
        request = _key(settings, [file.name for file in job.files], stamps)
        with _locked(self._stores / f"{request}.lock", self._progress):
            return self._find(job, settings) or self._make(job, settings, request, stamps)

    def _make(self, job: Job, settings: list[object], request: str, stamps: list[str | None]) -> str:
        """Build under a private name and publish by one rename. The caller holds the request's lock."""
        sizes = [file.num_bytes for file in job.files]
        size = "" if None in sizes else f", {sum(size or 0 for size in sizes) / 1e6:,.1f} MB"
        self._progress(f"preparing data: {len(job.files)} file(s){size}")
        private = self._stores / f"{request}.part"
        if None in stamps:
            shutil.rmtree(private, ignore_errors=True)  # nothing says that it was of the same content
        try:
            key, hashes = build(
                job,
                private,
                lambda hashes: _content_key(job, settings, hashes),
                stamps=stamps,
                num_workers=self._num_workers,
                preload=self._preload,
                progress=self._progress,
            )
            _publish(private, self._stores / key)
        except (UnisonoError, OSError) as error:
            if not _is_passing(error):
                shutil.rmtree(private, ignore_errors=True)
            raise
        for file, stamp, digest in zip(job.files, stamps, hashes):
            self._digests.remember(file, stamp, digest)
        return key


def _publish(private: Path, target: Path) -> None:
    """Give a finished folder its name; where another process was first with the same content, its folder stays."""
    try:
        private.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        shutil.rmtree(private)
    sync(target.parent)


def _is_passing(error: UnisonoError | OSError) -> bool:
    """Say whether another start can go on from the mark: neither the data nor the disk is at fault."""
    return isinstance(error, (TransferError, BrokenPipeError)) or not isinstance(error, (UserError, OSError))


def _content_key(job: Job, settings: list[object], hashes: list[str]) -> str:
    return _key(settings, hashes, [[file.kind, file.compression] for file in job.files])


@contextmanager
def _told(folder: Path) -> Iterator[None]:
    """Say where prepared data that is there cannot be read."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"the prepared data cannot be read: {error.strerror or error}",
            where=str(error.filename or folder),
            hint="see to its permissions, or remove the folder; it is made anew at the next start",
        ) from error


@contextmanager
def _locked(path: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a key; while another process has it, wait and say so."""
    with path.open("a+") as file:
        spoke = began = time.monotonic()
        while not _try_lock(file.fileno(), path):
            if time.monotonic() - spoke >= WAIT_NOTICE_SECONDS:
                spoke = time.monotonic()
                file.seek(0)
                holder = file.read().strip() or "another process"
                progress(f"waiting {spoke - began:.0f} s for the data that {holder} is preparing")
            time.sleep(_POLL_SECONDS)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def _try_lock(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise OutputError(
                f"the file system cannot lock files: {error.strerror}",
                where=str(path),
                hint="set data.cache_dir to a folder on a disk of this machine",
            ) from error
        raise
    return True


def _messages(part: Part) -> list[str]:
    name, job, folder, summary, counts = part.label, part.job, part.folder, part.summary, part.counts
    how = "recognised from the first record" if job.shape == "auto" else "as asked"
    lines = [f"{name}: records of the shape {summary['shape']} ({how})", f"{name}: {counts.sentence()}"]
    if counts.kept_validation:
        lines.append(f"{name}: {counts.kept_validation:,} of the kept ones are for validation, chosen by their content")
    lines.append(f"{name}: {counts.tokens:,} tokens, {counts.targets:,} targets ({counts.targets / counts.tokens:.1%})")
    num_left_out = int(summary["num_left_out"])
    if num_left_out:
        tokens = counts.dropped_tokens / (counts.dropped_tokens + counts.tokens)
        lines.append(f"{name}: lost {num_left_out / counts.records:.1%} of the records and {tokens:.1%} of the tokens")
        shown = [LeftOut(**item).line(job) for item in summary["left_out"][:NUM_SHOWN]]
        lines += [f"{name}: left out {line}" for line in shown]
        if num_left_out > len(shown):
            lines.append(f"{name}: ... and {num_left_out - len(shown):,} more, all in {folder / 'left_out.jsonl'}")
    if counts.open_answers:
        lines.append(f"{name}: {counts.open_answers:,} answers have no end marker: the template closes the last only")
    if summary["ignored"]:
        lines.append(f"{name}: fields that play no part: {', '.join(summary['ignored'])}")
    return lines
