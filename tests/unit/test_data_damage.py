"""Damage to prepared data, file by file: it is named, and never trained."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from support.runs import make_run
from support.tiny import save_tiny
from unisono.build import prepare
from unisono.config.load import load
from unisono.data.collate import collate
from unisono.data.prepare import Prepared
from unisono.errors import DataError


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def zero(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


WAYS: dict[str, Callable[[Path], object]] = {
    "one bit flipped": flip,
    "cut by half": cut,
    "cut to nothing": lambda file: os.truncate(file, 0),
    "all zero": zero,
    "missing": Path.unlink,
}


def read_all(prepared: Prepared) -> list[object]:
    """Everything that a run would train and validate on."""
    read: list[object] = []
    for store in (prepared.store, *prepared.validation.values()):
        batches = [collate(store, np.array([sample]), packed=True) for sample in range(len(store))]
        read += [(batch.input_ids.tolist(), batch.target_ids.tolist()) for batch in batches]
        read.append(store.record[np.arange(len(store))].tolist())
    return read


def test_every_file_in_every_way(tmp_path: Path) -> None:
    config = load(make_run(tmp_path, save_tiny(tmp_path / "tiny"), num_samples=12, data={"validation": 0.3}), []).config
    whole = read_all(prepare(config, lambda _: None).data)
    cache, kept = tmp_path / "cache", tmp_path / "kept"
    shutil.copytree(cache, kept)
    files = [file for file in sorted((cache / "stores").rglob("*")) if file.is_file() and file.stat().st_size]
    assert {"tokens.bin", "targets.bin", "index.bin", "store.json", "prepared.json"} <= {file.name for file in files}
    for file in files:
        for way, damage in WAYS.items():
            times = file.stat()
            damage(file)
            if file.exists():
                os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
            if file.suffix == ".lock":
                assert read_all(prepare(config, lambda _: None).data) == whole, way
            else:
                with pytest.raises(DataError, match="the prepared data is damaged") as met:
                    read_all(prepare(config, lambda _: None).data)
                assert met.value.hint is not None and Path(str(met.value.where)).is_relative_to(cache / "stores"), way
            shutil.rmtree(cache)
            shutil.copytree(kept, cache)


def test_a_change_of_the_same_size_and_time_is_seen(tmp_path: Path) -> None:
    config = load(make_run(tmp_path, save_tiny(tmp_path / "tiny"), num_samples=12), []).config
    data = Path(config.data.train[0])  # type: ignore[index]
    whole, times = read_all(prepare(config, lambda _: None).data), data.stat()
    text = data.read_text()
    data.write_text(text.replace("yes", "yEs", 1))
    os.utime(data, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert data.stat().st_size == len(text) and read_all(prepare(config, lambda _: None).data) != whole
    data.write_text(text)
    assert read_all(prepare(config, lambda _: None).data) == whole
