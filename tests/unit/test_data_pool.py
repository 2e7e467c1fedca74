"""Preparing on several cores: the same store, and nothing left behind, whoever dies."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from unisono.config.schema import DataSection
from unisono.data import build as building
from unisono.data.prepare import prepare
from unisono.errors import DataError, UnisonoError

NUM_RECORDS = 400


def _silent(line: str) -> None:
    pass


def section(folder: Path, cache: str, **settings: object) -> DataSection:
    """Conversations, some of which are too long or cannot be used."""
    path = folder / "a.jsonl"
    if not path.exists():
        turns = ("user", "assistant", "user", "assistant")
        with path.open("w", encoding="utf-8") as out:
            for i in range(NUM_RECORDS):
                messages = [{"role": role, "content": f"{role} {i} " * (1 + i % 7)} for role in turns[: 2 + i % 3]]
                out.write(json.dumps({"messages": messages}) + "\n")
                if i % 50 == 0:
                    out.write('{"messages": []}\n')
    values = {"on_error": "skip", "validation": 0.2, **settings}
    return DataSection(train=[str(path)], cache_dir=str(folder / cache), **values)


def _bytes_of(store: Path) -> dict[str, bytes]:
    return {str(file.relative_to(store)): file.read_bytes() for file in sorted(store.rglob("*")) if file.is_file()}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "SMALL_BYTES", 0)
    monkeypatch.setattr(building, "_BLOCK_RECORDS", 7)


def test_the_store_is_the_same_on_any_number_of_cores(tmp_path: Path, tiny: Path, small_blocks: None) -> None:
    stores = []
    for num_workers in (1, 2, 3):
        data = section(tmp_path, f"cache-{num_workers}")
        prepared = prepare(data, tiny, max_length=150, num_workers=num_workers, progress=_silent)
        assert prepared.counts.dropped_overlong and prepared.counts.skipped_bad == 8
        stores.append(_bytes_of(prepared.train.folder.parent))
    assert stores[0] == stores[1] == stores[2]


def test_errors_come_in_the_order_of_the_file(tmp_path: Path, tiny: Path, small_blocks: None) -> None:
    data = section(tmp_path, "cache", on_error="stop", max_skipped=100)
    with pytest.raises(DataError, match=r"8 of 408 records cannot be used:\n.*jsonl:2: .*\n.*jsonl:53: "):
        prepare(data, tiny, max_length=150, num_workers=2, progress=_silent)


def _prepare_for_ever(folder: Path, tokenizer: Path) -> None:
    building.SMALL_BYTES = 0
    building._BLOCK_RECORDS = 1
    building.MARK_SECONDS = -1.0
    original = building._num_hopeless

    def slow(*args: object) -> int:
        time.sleep(0.1)
        return original(*args)  # type: ignore[arg-type]

    building._num_hopeless = slow
    try:
        prepare(section(folder, "cache"), tokenizer, max_length=150, num_workers=2, progress=_silent)
    except UnisonoError as error:
        (folder / "error").write_text(str(error), encoding="utf-8")


def _start(folder: Path, tokenizer: Path) -> tuple[multiprocessing.process.BaseProcess, list[psutil.Process]]:
    """Start a preparation and wait until both of its workers are there."""
    section(folder, "cache")
    main = multiprocessing.get_context("spawn").Process(target=_prepare_for_ever, args=(folder, tokenizer))
    main.start()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        family = psutil.Process(main.pid).children(recursive=True)
        workers = [process for process in family if process.parent() and process.parent().pid != main.pid]
        if len(workers) == 2:
            return main, family
        time.sleep(0.05)
    main.kill()
    raise AssertionError("the workers did not start")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel shows no masks")
def test_ctrl_c_reaches_none_of_the_processes(tmp_path: Path, tiny: Path) -> None:
    main, family = _start(tmp_path, tiny)
    blocked = [_has_mask(process.pid, "SigBlk") or _has_mask(process.pid, "SigIgn") for process in family]
    server = [process.pid for process in family if any(other.ppid() == process.pid for other in family)]
    assert all(blocked) and all(_has_mask(pid, "SigBlk") for pid in server), "it ignores it only once it has loaded"
    os.kill(main.pid or 0, signal.SIGKILL)
    main.join(10)


def _has_mask(pid: int, name: str) -> bool:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(name)]
    return bool(int(line.split()[1], 16) >> (signal.SIGINT - 1) & 1)


def test_workers_end_when_their_main_is_killed(tmp_path: Path, tiny: Path) -> None:
    main, family = _start(tmp_path, tiny)
    os.kill(main.pid or 0, signal.SIGKILL)
    main.join(10)
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


def test_a_killed_worker_is_named(tmp_path: Path, tiny: Path) -> None:
    main, family = _start(tmp_path, tiny)
    workers = [process for process in family if process.ppid() != main.pid]
    end = time.monotonic() + 30
    while not list(tmp_path.glob("cache/stores/*.part/progress.json")):  # before the first mark nothing can be kept
        assert time.monotonic() < end and main.is_alive(), "no mark was made"
        time.sleep(0.01)
    workers[0].kill()
    main.join(30)
    assert main.exitcode == 0
    text = (tmp_path / "error").read_text(encoding="utf-8")
    assert "a process that prepares data was killed" in text and "what was prepared is kept, start again" in text
    assert list(tmp_path.glob("cache/stores/*.part/progress.json")), "it says that it is kept"
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
