"""Preparation that is hit in the middle: what was marked is kept, nothing half is taken as whole, nobody hangs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from unisono.config.schema import DataSection
from unisono.data import build as building
from unisono.data import prepare as preparing
from unisono.data import progress as telling
from unisono.data.prepare import Prepared, prepare
from unisono.data.source.read import read_records
from unisono.data.store import Mark, StoreWriter
from unisono.errors import DataError, TransferError, UnisonoError

NUM_RECORDS = 60


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mark every block of a few records."""
    monkeypatch.setattr(building, "_BLOCK_RECORDS", 5)
    monkeypatch.setattr(building, "MARK_SECONDS", -1.0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(NUM_RECORDS)))
    return path


def make(file: Path, tiny: Path, cache: str = "cache", *, num_workers: int = 1, say: Any = None) -> Prepared:
    data = DataSection(train=[str(file)], cache_dir=str(file.parent / cache))
    return prepare(data, tiny, max_length=100, num_workers=num_workers, progress=say or (lambda line: None))


def content(prepared: Prepared) -> dict[str, bytes]:
    folder = prepared.parts[0].folder
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def num_marked(folder: Path) -> int:
    """Return the records of the mark that is kept."""
    (mark,) = folder.glob("cache/stores/*.part/progress.json")
    return int(orjson.loads(mark.read_bytes())["counts"]["records"])


def check_goes_on(file: Path, tiny: Path) -> None:
    """Start again: it goes on from the mark, and the store is that of a start that nothing hit."""
    marked, said = num_marked(file.parent), list[str]()
    assert marked > 0
    again = make(file, tiny, say=said.append)
    assert any(f"going on after the {marked} records" in line for line in said)
    assert content(again) == content(make(file, tiny, "whole"))


def break_off(monkeypatch: pytest.MonkeyPatch, error: BaseException, after: int) -> None:
    """Let the reader of the next start raise after some records."""

    def read(*args: Any, **settings: Any) -> Iterator[Any]:
        for number, raw in enumerate(read_records(*args, **settings)):
            if number == after:
                monkeypatch.setattr(building, "read_records", read_records)
                raise error
            yield raw

    monkeypatch.setattr(building, "read_records", read)


@pytest.mark.parametrize(
    "error",
    [
        TransferError("the server does not answer", where="https://a/b.jsonl"),
        UnisonoError("a process that prepares data was killed"),
        KeyboardInterrupt(),
    ],
    ids=["server", "killed", "ctrl-c"],
)
def test_what_passes_leaves_the_mark(
    error: BaseException, file: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_off(monkeypatch, error, after=33)
    with pytest.raises(type(error)):
        make(file, tiny)
    check_goes_on(file, tiny)


def test_a_reader_of_the_progress_that_leaves_is_not_a_full_disk(
    file: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telling, "PROGRESS_SECONDS", 0.0)

    def say(line: str) -> None:
        if ", 30 records, " in line:  # not 230 records/s
            raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        make(file, tiny, say=say)
    check_goes_on(file, tiny)


def test_a_fault_of_the_data_leaves_nothing(file: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_off(monkeypatch, DataError("the archive is damaged"), after=33)
    with pytest.raises(DataError):
        make(file, tiny)
    assert not list(file.parent.glob("cache/stores/*.part"))


@pytest.mark.parametrize("name", ["train/tokens.bin", "train/index.bin", "left_out.jsonl"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_mark_whose_files_are_short_means_to_begin_anew(
    name: str, damage: str, file: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = file.read_text()
    file.write_text(json.dumps({"text": "x" * 200}) + "\n" + text)  # too long: something is left out
    break_off(monkeypatch, KeyboardInterrupt(), after=33)
    with pytest.raises(KeyboardInterrupt):
        make(file, tiny)
    (private,) = file.parent.glob("cache/stores/*.part")
    if damage == "gone":
        (private / name).unlink()
    else:
        os.truncate(private / name, 7)
    said: list[str] = []
    again = make(file, tiny, say=said.append)
    assert not any("going on after" in line for line in said)
    assert content(again) == content(make(file, tiny, "whole"))


def test_a_file_that_changes_while_its_lock_is_waited_for_is_refused(
    file: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_off(monkeypatch, KeyboardInterrupt(), after=33)
    with pytest.raises(KeyboardInterrupt):
        make(file, tiny)
    original = preparing._locked

    @contextmanager
    def locked(*args: Any) -> Iterator[None]:
        file.write_text(file.read_text().replace("text ", "TEXT "))
        with original(*args):
            yield

    monkeypatch.setattr(preparing, "_locked", locked)
    with pytest.raises(DataError, match="was changed while it was read"):
        make(file, tiny)  # it would go on after records of the older content


def test_who_is_second_with_the_same_content_takes_the_first_ones_store(tmp_path: Path) -> None:
    first, second = tmp_path / "key", tmp_path / "request.part"
    for folder in (first, second):
        folder.mkdir()
        (folder / "prepared.json").write_text(folder.name)
    preparing._publish(second, first)
    assert (first / "prepared.json").read_text() == "key" and not second.exists()
    with pytest.raises(FileNotFoundError):
        preparing._publish(second, tmp_path / "other")


def test_on_a_full_disk_every_file_is_closed(tmp_path: Path) -> None:
    class Full:
        closed = 0

        def close(self) -> None:
            Full.closed += 1
            raise OSError(28, "No space left on device")

    writer = StoreWriter(tmp_path / "train", Mark())
    with writer:
        pass
    writer._files = {name: Full() for name in writer._files}  # type: ignore[misc]
    with pytest.raises(OSError, match="No space left"), writer:
        pass
    assert Full.closed == 3


@pytest.mark.parametrize("during", ["submit", "shutdown"])
def test_ctrl_c_waits_while_processes_are_started_or_ended(
    during: str, file: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "SMALL_BYTES", 0)
    original, ended = getattr(ProcessPoolExecutor, during), list[int]()

    def interrupted(*args: Any, **settings: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        result = original(*args, **settings)
        ended.append(1)
        return result

    monkeypatch.setattr(ProcessPoolExecutor, during, interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        make(file, tiny, num_workers=2)
    assert ended == [1], "it was broken off, and would have left half of what it does"
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())


@pytest.mark.parametrize("error", [EOFError("Ran out of input"), ConnectionResetError(104, "reset")])
def test_a_server_of_processes_that_dies_is_named(
    error: Exception, file: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "SMALL_BYTES", 0)

    def fail(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(ProcessPoolExecutor, "submit", fail)
    with pytest.raises(UnisonoError, match="a process that prepares data was killed"):
        make(file, tiny, num_workers=2)
