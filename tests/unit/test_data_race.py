"""Any number of processes may prepare the same data at once, and any of them may die."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

from support.ranks import run_ranks
from unisono.config.schema import DataSection
from unisono.data import build as building
from unisono.data import prepare as preparing
from unisono.data.prepare import prepare
from unisono.data.store import Piece

NUM_REPEATS = 20
NUM_RECORDS = 40


def data_in(folder: Path) -> DataSection:
    path = folder / "a.jsonl"
    if not path.exists():
        records = [{"prompt": f"question {i}", "completion": f"answer {i}"} for i in range(NUM_RECORDS)]
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return DataSection(train=[str(path)], cache_dir=str(folder / "cache"), validation=0.3)


def published(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "cache" / "stores").iterdir() if path.is_dir())


def _silent(line: str) -> None:
    pass


def _prepare_often(rank: int, world: int, folder: Path, tokenizer: Path) -> list[list[int]]:
    """Meet the other ranks before each empty cache, sleep a little, prepare."""
    found = []
    chance = random.Random(rank)
    for repeat in range(NUM_REPEATS):
        place = folder / str(repeat)
        (place / f"here-{rank}").touch()
        while len(list(place.glob("here-*"))) < world:
            time.sleep(0.005)
        time.sleep(chance.random() * (1.0 if repeat == 0 else 0.05))
        prepared = prepare(data_in(place), tokenizer, max_length=100, progress=_silent)
        found.append([len(prepared.train), len(prepared.validation[""]), prepared.train.num_tokens])
    return found


def test_b37_two_jobs_of_two_ranks_on_an_empty_cache(tmp_path: Path, tiny: Path) -> None:
    for repeat in range(NUM_REPEATS):
        (tmp_path / str(repeat)).mkdir()
        data_in(tmp_path / str(repeat))
    found = run_ranks(_prepare_often, 4, tmp_path, tiny, limit=110.0)
    assert all(result == found[0][0] for results in found for result in results)
    assert found[0][0][0] + found[0][0][1] == NUM_RECORDS
    for repeat in range(NUM_REPEATS):
        assert len(published(tmp_path / str(repeat))) == 1, "one complete entry and nothing else"


def _die_half_way(folder: Path, tokenizer: Path, seconds: float, after: int) -> None:
    """Prepare block by block, marking each, and be killed by the kernel's hardest signal at one of them."""
    original = building.StoreWriter.append

    def append(self: building.StoreWriter, piece: Piece) -> None:
        original(self, piece)
        if piece.index[-1:, 2].tolist() >= [after]:
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGKILL)

    building.StoreWriter.append = append  # type: ignore[method-assign]
    building.MARK_SECONDS = -1.0
    building._BLOCK_RECORDS = 3
    prepare(data_in(folder), tokenizer, max_length=100, progress=_silent)


def _start_victim(
    folder: Path, tokenizer: Path, *, seconds: float = 0.0, after: int = NUM_RECORDS // 2
) -> multiprocessing.process.BaseProcess:
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["support.preload"])
    victim = server.Process(target=_die_half_way, args=(folder, tokenizer, seconds, after), daemon=True)
    victim.start()
    return victim


def _bytes_of(store: Path) -> dict[str, bytes]:
    return {str(file.relative_to(store)): file.read_bytes() for file in sorted(store.rglob("*")) if file.is_file()}


@pytest.mark.parametrize("after", [0, NUM_RECORDS // 2, NUM_RECORDS - 1])
def test_b37_a_killed_preparation_goes_on_and_ends_as_if_nothing_had_been(
    tmp_path: Path, tiny: Path, after: int
) -> None:
    data = data_in(tmp_path)
    victim = _start_victim(tmp_path, tiny, after=after)
    victim.join(60)
    assert victim.exitcode == -signal.SIGKILL
    (fragment,) = published(tmp_path)
    assert fragment.endswith(".part")
    said: list[str] = []
    prepared = prepare(data, tiny, max_length=100, progress=said.append)
    assert prepared.counts.records == prepared.counts.kept == NUM_RECORDS
    assert published(tmp_path) == [prepared.train.key]
    went_on = [line for line in said if "going on after" in line]
    assert bool(went_on) == (after > 0), "the first block was not marked when the first kill came"
    apart = DataSection(train=data.train, validation=0.3, cache_dir=str(tmp_path / "apart"))
    untouched = prepare(apart, tiny, max_length=100, progress=_silent)
    assert _bytes_of(untouched.train.folder.parent) == _bytes_of(prepared.train.folder.parent)


def test_a_damaged_mark_means_to_begin_anew(tmp_path: Path, tiny: Path) -> None:
    _start_victim(tmp_path, tiny).join(60)
    (mark,) = tmp_path.glob("cache/stores/*.part/progress.json")
    mark.write_bytes(mark.read_bytes()[:40])
    said: list[str] = []
    prepared = prepare(data_in(tmp_path), tiny, max_length=100, progress=said.append)
    assert prepared.counts.kept == NUM_RECORDS and not any("going on after" in line for line in said)


def test_b37_who_waits_says_for_whom_and_takes_over_from_a_dead_writer(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparing, "WAIT_NOTICE_SECONDS", 0.2)
    data = data_in(tmp_path)
    victim = _start_victim(tmp_path, tiny, seconds=1.5)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("cache/stores/*.part/train")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    said: list[str] = []
    prepared = prepare(data, tiny, max_length=100, progress=said.append)
    victim.join(60)
    assert prepared.counts.kept == NUM_RECORDS and published(tmp_path) == [prepared.train.key]
    assert any(line.startswith("waiting") and f"process {victim.pid} on " in line for line in said)


def test_b37_a_failure_is_the_same_for_all_and_leaves_nothing(tmp_path: Path, tiny: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": ""}\n')
    errors = run_ranks(_prepare_bad, 2, tmp_path, tiny)
    assert errors[0] == errors[1] and "a.jsonl:1: 'completion' is empty" in errors[0]
    assert published(tmp_path) == []


def _prepare_bad(rank: int, world: int, folder: Path, tokenizer: Path) -> str:
    from unisono.errors import DataError

    with pytest.raises(DataError) as caught:
        prepare(data_in(folder), tokenizer, max_length=100, progress=_silent)
    return str(caught.value)
