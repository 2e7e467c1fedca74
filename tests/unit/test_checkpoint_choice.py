"""Which checkpoint a run goes on from, and which ones are deleted: manifests decide, names and times do not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import orjson
import pytest

from unisono.checkpoint.manifest import Manifest, compare_settings, newest_sound, read, seal, sum_of, verify
from unisono.checkpoint.save import purge, remove_leftovers
from unisono.errors import CheckpointError


def make(checkpoints: Path, update: int, *, name: str | None = None, loss: float | None = None) -> Path:
    """Make a sound checkpoint of two small files."""
    folder = checkpoints / (name or f"update-{update:08d}")
    folder.mkdir(parents=True)
    for rank in range(2):
        (folder / f"__{rank}_0.distcp").write_bytes(bytes([update % 256, rank]) * 100)
    state = {"update": update, "precision": {"scale": 32768.0, "_growth_tracker": 7.0}}
    seal(folder, Manifest(update=update, epoch=0, world=2, state=state, settings={}, validation_loss=loss))
    return folder


def test_b59_the_number_in_the_manifest_counts(tmp_path: Path) -> None:
    make(tmp_path, 900, name="update-900")
    make(tmp_path, 1000, name="update-0001000")
    newest = make(tmp_path, 1100, name="update-1100")
    for stray in ("best", "x.tmp"):
        (tmp_path / stray).mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    os.utime(tmp_path / "update-900")
    os.utime(tmp_path / "update-900/manifest.json")
    os.utime(newest, (1, 1))
    assert newest_sound(tmp_path)[0] == newest


def test_b51_planted_folders_are_passed_over_aloud(tmp_path: Path) -> None:
    sound = make(tmp_path, 10)
    (tmp_path / "update-00000099").mkdir()
    cut_short = make(tmp_path, 98)
    (cut_short / "manifest.json").unlink()
    chosen, said = newest_sound(tmp_path)
    assert chosen == sound
    assert said == [
        "ignored update-00000098: it has no manifest: the save was cut short",
        "ignored update-00000099: it has no manifest: the save was cut short",
    ]


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def swap(folder: Path) -> None:
    first, second, spare = folder / "__0_0.distcp", folder / "__1_0.distcp", folder / "spare"
    first.rename(spare)
    second.rename(first)
    spare.rename(second)


DAMAGE = {
    "flipped": (lambda folder: flip(folder / "__1_0.distcp"), "__1_0.distcp is damaged"),
    "cut": (lambda folder: os.truncate(folder / "__0_0.distcp", 150), "has 150 bytes, its manifest says 200"),
    "empty": (lambda folder: os.truncate(folder / "__0_0.distcp", 0), "__0_0.distcp has 0 bytes"),
    "missing": (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "swapped": (swap, "__0_0.distcp is damaged"),
    "older file": (
        lambda folder: shutil.copy(folder.parent / "update-00000001/__0_0.distcp", folder),
        "__0_0.distcp is damaged",
    ),
    "manifest cut": (lambda folder: os.truncate(folder / "manifest.json", 40), "its manifest cannot be read"),
    "manifest empty": (lambda folder: os.truncate(folder / "manifest.json", 0), "its manifest cannot be read"),
    "manifest a list": (lambda folder: (folder / "manifest.json").write_text("[]"), "its manifest cannot be read"),
    "manifest without files": (lambda folder: strip(folder, "files"), "its manifest cannot be read"),
    "manifest without state": (lambda folder: strip(folder, "state"), "its manifest cannot be read"),
    "manifest of nothing": (lambda folder: strip(folder, "files", {}), "its manifest names no files"),
    "manifest with another number": (
        lambda folder: (folder / "manifest.json").write_bytes(
            (folder / "manifest.json").read_bytes().replace(b'"update": 3', b'"update": 2')
        ),
        "its manifest is damaged",
    ),
    "manifest of the future": (lambda folder: strip(folder, "format", 9), "not of format 2"),
}


def strip(folder: Path, key: str, instead: object = None) -> None:
    """Write another manifest, with a right sum of itself."""
    file = folder / "manifest.json"
    values = orjson.loads(file.read_bytes())
    del values[key], values["sha256"]
    values |= {} if instead is None else {key: instead}
    file.write_bytes(orjson.dumps(values | {"sha256": sum_of(values)}))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_never_chosen(tmp_path: Path, damage: str) -> None:
    make(tmp_path, 1)
    sound, newest = make(tmp_path, 2), make(tmp_path, 3)
    act, reason = DAMAGE[damage]
    act(newest)
    with pytest.raises(CheckpointError, match=reason):
        verify(newest)
    chosen, said = newest_sound(tmp_path)
    assert chosen == sound
    assert len(said) == 1 and said[0].startswith("ignored update-00000003: ") and reason in said[0]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for update, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 4.0)):
        make(tmp_path, update, loss=loss)
    purge(tmp_path, 2, update=5)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"update-{u:08d}" for u in (2, 4, 5)]


def test_purging_counts_only_what_this_run_has_done(tmp_path: Path) -> None:
    """A damaged checkpoint of a later update must not push out the sound one that was just saved."""
    later = make(tmp_path, 9)
    flip(later / "__0_0.distcp")
    older, just_saved = make(tmp_path, 5), make(tmp_path, 6)
    purge(tmp_path, 1, update=6)
    assert not older.exists() and just_saved.exists()
    assert newest_sound(tmp_path)[0] == just_saved


def test_purging_leaves_what_is_not_the_runs_own(tmp_path: Path) -> None:
    for update in (1, 2, 3):
        make(tmp_path, update)
    mine = make(tmp_path, 1, name="a copy of mine")
    (tmp_path / "update-00000000").mkdir()
    purge(tmp_path, 1, update=3)
    assert mine.exists() and (tmp_path / "update-00000000").exists()
    assert not (tmp_path / "update-00000002").exists()


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in (".update-00000003.tmp", ".update-00000002.old", ".mine", "update-00000001"):
        (tmp_path / name).mkdir()
    assert sorted(remove_leftovers(tmp_path)) == [".update-00000002.old", ".update-00000003.tmp"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine", "update-00000001"]


def test_a_manifest_comes_back_as_it_was(tmp_path: Path) -> None:
    manifest = read(make(tmp_path, 3, loss=0.1 + 0.2))
    assert (manifest.update, manifest.epoch, manifest.world, manifest.validation_loss) == (3, 0, 2, 0.1 + 0.2)
    assert sorted(manifest.files) == ["__0_0.distcp", "__1_0.distcp"]


def test_b09_the_loss_scale_comes_back(tmp_path: Path) -> None:
    """The stored scale, not the first one; and the growth counter as the whole number that it is."""
    import torch

    from unisono.precision import Precision

    saved = Precision("fp16", torch.device("cpu"))
    weight = torch.nn.Parameter(torch.ones(1))
    saved.scale(weight.sum()).backward()
    saved.skip(torch.optim.SGD([weight], lr=0.1))
    folder = tmp_path / "update-00000004"
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(b"tensors")
    seal(folder, Manifest(update=4, epoch=0, world=1, state={"precision": saved.state()}, settings={}))
    resumed = Precision("fp16", torch.device("cpu"))
    resumed.restore(read(folder).state["precision"])
    assert resumed.state() == saved.state()
    assert resumed.state()["scale"] == 32768.0
    resumed.scale(weight.sum()).backward()
    assert weight.grad is not None and weight.grad.item() == 32768.0


def test_settings_that_differ_are_named_with_both_values() -> None:
    then, now = {"a": 1, "b": [2], "gone": None}, {"a": 1, "b": [3], "new": "x"}
    assert compare_settings(then, now) == ["b: [2] then, [3] now", "new: None then, 'x' now"]
