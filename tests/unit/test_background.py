"""Saving beside training: what is written is the copy, errors surface, and the stall is the copy alone (B52)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from unisono.checkpoint import save as saving
from unisono.checkpoint.background import Background
from unisono.checkpoint.interval import MOST_SECONDS, seconds_between_saves
from unisono.checkpoint.load import load_checkpoint
from unisono.checkpoint.manifest import Manifest, newest_sound
from unisono.checkpoint.save import check_room, save_checkpoint
from unisono.dist import World
from unisono.errors import CheckpointError

ALONE = World(0, 1, 0, 1, torch.device("cpu"))


def save(folder: Path, update: int, tensors: dict[str, torch.Tensor], keep: int = 2) -> Path:
    return save_checkpoint(folder, tensors, Manifest(update, 0, 1, {}, {}), world=ALONE, keep=keep)


def test_what_is_written_is_the_state_at_the_save(tmp_path: Path) -> None:
    background, weight = Background(), torch.arange(4.0)

    def slow(tensors: dict[str, torch.Tensor]) -> None:
        time.sleep(0.2)
        save(tmp_path, 1, tensors)

    background.save({"w": weight}, slow)
    weight.add_(100)  # the next update
    background.wait()
    loaded = {"w": torch.zeros(4)}
    load_checkpoint(tmp_path / "update-00000001", loaded, world=ALONE)
    assert loaded["w"].tolist() == [0, 1, 2, 3] and background.seconds >= 0.2


def test_a_save_of_ten_megabytes_holds_training_up_for_less_than_50_ms() -> None:
    background, state = Background(), {str(k): torch.zeros(125_000, dtype=torch.float32) for k in range(20)}
    assert sum(each.nbytes for each in state.values()) == 10_000_000
    stalls = []
    for _ in range(5):
        background.wait()
        begin = time.perf_counter()
        background.save(state, lambda tensors: time.sleep(0.3))
        stalls.append(time.perf_counter() - begin)
    background.wait()
    assert sorted(stalls)[2] < 0.05, stalls


def test_b52_what_fails_beside_training_is_raised(tmp_path: Path) -> None:
    def fail(tensors: object) -> None:
        raise CheckpointError("no room")

    background = Background()
    background.save({}, fail)
    time.sleep(0.2)
    with pytest.raises(CheckpointError, match="no room"):
        background.check()
    background.check()
    background.save({}, fail)
    with pytest.raises(CheckpointError, match="no room"):
        background.save({}, lambda tensors: None)


def test_b54_a_full_disk_leaves_the_old_ones_and_says_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.zeros(2_000_000)}
    for update in (1, 2):
        save(tmp_path, update, state)
    usage = saving.shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(saving.shutil, "disk_usage", lambda _: usage._replace(free=5_000_000))
        with pytest.raises(CheckpointError, match=r"update 3 needs 8\.0 MB, 5\.0 MB are free") as met:
            save(tmp_path, 3, state)
        assert met.value.hint is not None and "make room" in met.value.hint
        with pytest.raises(OSError, match="needs 6,0"):
            check_room(tmp_path, 6_000_000_000, "all of it")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["update-00000001", "update-00000002"]
    assert newest_sound(tmp_path)[0] == tmp_path / "update-00000002"
    save(tmp_path, 3, state)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["update-00000002", "update-00000003"]


def test_young() -> None:
    assert seconds_between_saves(0.0) == 0.0
    assert seconds_between_saves(0.5) == pytest.approx((2 * 0.5 * 3 * 3600) ** 0.5)
    assert seconds_between_saves(1000.0) == MOST_SECONDS
