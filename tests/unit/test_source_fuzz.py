"""The fuzzer's finds, read again; and the fuzzer itself for a moment, always the same one."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "fuzz"))

from fuzz_readers import FINDS, make_input, read_all

NUM_INPUTS = 1500


def test_what_was_found_is_answered(tmp_path: Path) -> None:
    for find in sorted(FINDS.iterdir()):
        if find.suffix != ".md":
            read_all(Path(shutil.copy(find, tmp_path / find.name)))


def test_spoilt_files_give_records_or_a_named_error(tmp_path: Path) -> None:
    num_records = 0
    for index in range(NUM_INPUTS):
        ending, content = make_input(0, index)
        path = tmp_path / f"input.{ending}"
        path.write_bytes(content)
        try:
            num_records += read_all(path)
        except BaseException as error:
            raise AssertionError(f"input {index} of seed 0, .{ending}: {error!r}") from error
    assert num_records > NUM_INPUTS // 2
