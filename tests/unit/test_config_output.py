"""The output folder is tried before hours are spent, and nothing is left of the trial."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from unisono.config.check import check_output_dir
from unisono.errors import OutputError


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("path", ["out", "a/b/out", "with space/ü"])
def test_b63_probe_leaves_nothing_behind(tmp_path: Path, path: str) -> None:
    check_output_dir(tmp_path / path)
    assert tree(tmp_path) == []


def test_b63_existing_folder_is_kept_with_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text("x", encoding="utf-8")
    check_output_dir(tmp_path / "out")
    assert tree(tmp_path) == ["out", "out/metrics.jsonl"]


@pytest.mark.parametrize("path", ["file", "file/out", "file/a/out"])
def test_b63_path_at_or_under_a_regular_file_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(OutputError, match=r"file is not a folder") as error:
        check_output_dir(tmp_path / path)
    assert error.value.exit_code == 2
    assert tree(tmp_path) == ["file"]


def test_b63_link_to_a_folder_works_and_a_dangling_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("gone")
    check_output_dir(tmp_path / "link")
    check_output_dir(tmp_path / "link" / "below")
    with pytest.raises(OutputError, match="dangling is a link to gone, which does not exist"):
        check_output_dir(tmp_path / "dangling")
    with pytest.raises(OutputError, match="dangling is not a folder"):
        check_output_dir(tmp_path / "dangling" / "below")
    assert tree(tmp_path) == ["dangling", "link", "real"]


def test_b63_parent_need_not_be_writable_when_the_folder_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parent" / "out").mkdir(parents=True)

    def no_new_folders(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", no_new_folders)
    check_output_dir(tmp_path / "parent" / "out")
    with pytest.raises(OutputError, match="cannot be written: Permission denied"):
        check_output_dir(tmp_path / "parent" / "other")


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_b63_each_step_of_the_probe_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OutputError, match="cannot be written: No space left on device"):
        check_output_dir(tmp_path / "new" / "out")
    assert tree(tmp_path) == []


def test_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="File name too long"):
        check_output_dir(tmp_path / ("x" * 300))
