"""Damage to a checkpoint, file by file: it is refused by name, and the newest sound one is used (B51)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from support.runs import checkpoint_names, make_run, train_whole
from unisono.checkpoint.manifest import newest_sound


def flip(file: Path, other: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def zero_page(file: Path, other: Path) -> None:
    data = bytearray(file.read_bytes())
    page = min(4096, len(data))
    data[:page] = bytes(page)
    file.write_bytes(data)


WAYS: dict[str, Callable[[Path, Path], object]] = {
    "one bit flipped": flip,
    "cut by half": lambda file, other: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "cut to nothing": lambda file, other: file.write_bytes(b""),
    "a page of zeros": zero_page,
    "missing": lambda file, other: file.unlink(),
    "that of the other checkpoint": lambda file, other: shutil.copyfile(other, file),
}


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with checkpoints after updates 2 and 4."""
    folder = tmp_path_factory.mktemp("damage")
    train_whole(2, make_run(folder, tiny, length={"updates": 4}, checkpoint={"every": 2}))
    return folder / "run"


def test_every_file_in_every_way(run: Path, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    names = sorted(file.name for file in (run / "checkpoints/update-00000004").iterdir())
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"]
    for name in names:
        for way, damage in WAYS.items():
            shutil.copytree(run / "checkpoints", checkpoints)
            newest, older = checkpoints / "update-00000004", checkpoints / "update-00000002"
            damage(newest / name, older / name)
            found, passed_over = newest_sound(checkpoints)
            assert found == older, (name, way)
            assert len(passed_over) <= 1, "each is named once"
            if (name, way) != ("manifest.json", "that of the other checkpoint"):
                assert "update-00000004" in passed_over[0] and (name in passed_over[0] or "manifest" in passed_over[0])
            shutil.rmtree(checkpoints)


@pytest.mark.parametrize("name", ["__1_0.distcp", ".metadata"])
def test_a_run_goes_on_from_the_older_one(name: str, tiny: Path, run: Path, tmp_path: Path) -> None:
    file = make_run(tmp_path, tiny, length={"updates": 4}, checkpoint={"every": 2})
    shutil.copytree(run, tmp_path / "run")
    flip(tmp_path / "run/checkpoints/update-00000004" / name, tmp_path)
    said = train_whole(2, file)
    assert f"ignored update-00000004: {name} is damaged" in said and "resumed update-00000002: 2 of 4" in said
    assert checkpoint_names(tmp_path / "run") == ["update-00000002", "update-00000004"]
    assert newest_sound(tmp_path / "run/checkpoints")[0] == tmp_path / "run/checkpoints/update-00000004"
