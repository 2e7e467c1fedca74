"""Prepare the data once: find it by its content, or make it under a lock and publish it by one rename.

A prepared store is found by a key: a hash over the content of the data files, of the tokenizer's files and of
every setting that matters. Whoever does not find it takes the key's lock; the kernel frees the lock when its holder
dies. The holder writes under a private name, syncs, renames; the others wait and say for whom. So any number of
processes and jobs may call ``prepare`` at once, and one that was killed leaves only a folder that the next one removes.

When the store exists, neither torch nor transformers is imported.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import orjson

from unisono.config.schema import DataSection, sources_of, validation_sets_of
from unisono.data.build import Counts, Job, build
from unisono.data.read import check_file
from unisono.data.store import STORE_VERSION, Store, open_store
from unisono.durable import sync
from unisono.errors import ModelError, OutputError

FORMAT_VERSION = 1
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
class Prepared:
    """Stores that are ready, where the records went, and lines for the person.

    ``validation``: a store for each set by its name; the only unnamed set, files or a share, has the empty name.
    """

    train: Store
    validation: dict[str, Store]
    counts: Counts
    format: str
    messages: tuple[str, ...]


def prepare(
    data: DataSection,
    tokenizer_dir: Path,
    *,
    max_length: int,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] = print,
) -> Prepared:
    """Return the token stores of a run, making those that do not exist yet.

    Safe to call from any number of processes at once. DataError names file and line; ModelError is about the tokenizer.
    """
    share = data.validation if isinstance(data.validation, float) else 0.0
    stores = Path(data.cache_dir).expanduser() / "stores"

    def job(files: list[str], validation_share: float) -> Job:
        return Job(
            files=tuple(Path(name).expanduser() for name in files),
            shape=data.format,
            max_length=max_length,
            overlong=data.overlong,
            on_error=data.on_error,
            max_skipped=data.max_skipped,
            validation_share=validation_share,
            tokenizer_dir=tokenizer_dir,
            trust_remote_code=trust_remote_code,
        )

    files = [name for names in sources_of(data).values() for name in names]
    folder, summary = _obtain(job(files, share), stores, progress)
    messages = _messages("train", job(files, share), folder, summary)
    validation = {"": open_store(folder / "validation")} if share else {}
    for name, names in validation_sets_of(data).items():
        theirs = job(names, 0.0)
        their_folder, their_summary = _obtain(theirs, stores, progress)
        messages += _messages(f"validation {name}".strip(), theirs, their_folder, their_summary)
        validation[name] = open_store(their_folder / "train")
    return Prepared(
        train=open_store(folder / "train"),
        validation=validation,
        counts=Counts(**summary["counts"]),
        format=str(summary["shape"]),
        messages=tuple(messages),
    )


def store_key(job: Job, progress: Callable[[str], None]) -> str:
    """Hash everything that the prepared tokens depend on."""
    names = {path for pattern in _TOKENIZER_FILES for path in job.tokenizer_dir.glob(pattern) if path.is_file()}
    if not any(path.name.startswith(("tokenizer", "vocab", "spiece")) for path in names):
        raise ModelError("there is no tokenizer in the folder", where=str(job.tokenizer_dir))
    parts = {
        "version": [FORMAT_VERSION, STORE_VERSION, version("transformers"), version("tokenizers"), version("jinja2")],
        "data": [_hash_file(path, progress) for path in job.files],
        "kinds": [path.suffix.lower() for path in job.files],
        "tokenizer": [[path.name, _hash_file(path, progress)] for path in sorted(names)],
        "settings": [job.shape, job.max_length, job.overlong, job.on_error, job.max_skipped, job.validation_share],
        "trust_remote_code": job.trust_remote_code,
    }
    return hashlib.sha256(orjson.dumps(parts)).hexdigest()[:32]


def _hash_file(path: Path, progress: Callable[[str], None]) -> str:
    digest = hashlib.sha256()
    size = max(1, path.stat().st_size)
    num_bytes = 0
    spoke = time.monotonic()
    with path.open("rb") as file:
        while chunk := file.read(2**22):
            digest.update(chunk)
            num_bytes += len(chunk)
            if time.monotonic() - spoke > WAIT_NOTICE_SECONDS:
                spoke = time.monotonic()
                progress(f"preparing data: {num_bytes / size:.0%} of {path.name} compared with earlier data")
    return digest.hexdigest()


def _obtain(job: Job, stores: Path, progress: Callable[[str], None]) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a job's stores and its summary, building them if they are not there."""
    for path in job.files:
        check_file(path)
    key = store_key(job, progress)
    folder = stores / key
    if not folder.is_dir():
        try:
            stores.mkdir(parents=True, exist_ok=True)
            with _locked(stores / f"{key}.lock", progress):
                if not folder.is_dir():
                    _make(job, folder, key, progress)
        except OSError as error:
            raise OutputError(
                f"prepared data cannot be written: {error.strerror or error}",
                where=str(error.filename or stores),
                hint="data.cache_dir must be a folder with free space that can be written",
            ) from error
    return folder, cast(dict[str, Any], orjson.loads((folder / "prepared.json").read_bytes()))


def _make(job: Job, folder: Path, key: str, progress: Callable[[str], None]) -> None:
    """Build under a private name and publish by one rename. The caller holds the key's lock."""
    for leftover in folder.parent.glob(f"{key}.tmp-*"):
        progress(f"preparing data: removing what a stopped process left: {leftover.name}")
        shutil.rmtree(leftover)
    num_bytes = sum(path.stat().st_size for path in job.files)
    progress(f"preparing data: {len(job.files)} file(s), {num_bytes / 1e6:,.1f} MB")
    private = folder.parent / f"{key}.tmp-{os.getpid()}-{secrets.token_hex(4)}"
    private.mkdir()
    try:
        build(job, private, key, progress)
        private.rename(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(private, ignore_errors=True)


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


def _messages(name: str, job: Job, folder: Path, summary: dict[str, Any]) -> list[str]:
    """Say what the records are, where they went, and which were left out."""
    counts = Counts(**summary["counts"])
    how = "recognised from the first record" if job.shape == "auto" else "as asked"
    lines = [f"{name}: records of the shape {summary['shape']} ({how})", f"{name}: {counts.sentence()}"]
    if counts.kept_validation:
        lines.append(f"{name}: {counts.kept_validation:,} of the kept ones are for validation, chosen by their content")
    lines.append(f"{name}: {counts.tokens:,} tokens, {counts.targets:,} targets ({counts.targets / counts.tokens:.1%})")
    num_left_out = int(summary["num_left_out"])
    if num_left_out:
        tokens = counts.dropped_tokens / (counts.dropped_tokens + counts.tokens)
        lines.append(f"{name}: lost {num_left_out / counts.records:.1%} of the records and {tokens:.1%} of the tokens")
        shown = [f"{job.files[x['file']]}:{x['line']}: {x['reason']}" for x in summary["left_out"][:NUM_SHOWN]]
        lines += [f"{name}: left out {line}" for line in shown]
        if num_left_out > len(shown):
            lines.append(f"{name}: ... and {num_left_out - len(shown):,} more, all in {folder / 'left_out.jsonl'}")
    if counts.open_answers:
        lines.append(f"{name}: {counts.open_answers:,} answers have no end marker: the template closes the last only")
    if summary["ignored"]:
        lines.append(f"{name}: fields that play no part: {', '.join(summary['ignored'])}")
    return lines
