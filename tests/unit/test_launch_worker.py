"""What a rank does around its main, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unisono.stopping import AGAIN

MAINS = """
import signal, sys, threading
from unisono.errors import ConfigError
from unisono.worker import run_worker

def main():
    print("working", end="")
    how = sys.argv[1]
    if how == "fail":
        raise ValueError("bad weights")
    if how == "refuse":
        raise ConfigError("no such key", where="run.yaml:3", hint="mend it")
    if how == "exit":
        sys.exit(int(sys.argv[2]))
    if how == "words":
        sys.exit("some words")
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "thread":
        threading.Thread(target=threading.Event().wait).start()

if __name__ == "__main__":
    run_worker(main)
"""


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a main through ``python -m unisono.worker`` and wait for its end."""
    (folder / "mains.py").write_text(MAINS)
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        [sys.executable, "-m", "unisono.worker", "mains", *arguments],
        cwd=folder,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "code", "last_line"),
    [
        (("finish",), 0, ""),
        (("thread",), 0, ""),  # a thread that never ends does not hold the process
        (("exit", "0"), 1, "error: the rank left by sys.exit(0) before its work was done"),
        (("exit", "7"), 7, ""),
        (("interrupt",), AGAIN, ""),
        (("words",), 1, "error: some words"),
        (("fail",), 1, "ValueError: bad weights"),
        (("refuse",), 2, "error: run.yaml:3: no such key\n  hint: mend it"),
    ],
)
def test_exit_code_and_last_words(tmp_path: Path, arguments: tuple[str, ...], code: int, last_line: str) -> None:
    ended = start(tmp_path, *arguments)
    assert (ended.returncode, ended.stdout) == (code, "working")
    assert ended.stderr.rstrip().endswith(last_line)
    assert bool(ended.stderr) == bool(last_line)


def test_the_error_is_left_for_torchrun_and_printed(tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    file = tmp_path / "error.json"
    ended = start(tmp_path, "fail", TORCHELASTIC_ERROR_FILE=str(file), RANK="1", WORLD_SIZE="4")
    assert ended.stderr.startswith("rank 1 of 4:\nTraceback")
    read = ProcessFailure(local_rank=1, pid=1, exitcode=1, error_file=str(file))
    assert "ValueError: bad weights" in read.message
    assert read.timestamp == json.loads(file.read_text())["time_ns"] // 10**9
    assert list(tmp_path.glob("*.part")) == []


def test_under_the_launcher_the_error_is_left_to_it(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    ended = start(
        tmp_path, "refuse", TORCHELASTIC_ERROR_FILE=str(file), UNISONO_LAUNCHER_PID=str(os.getpid()), RANK="1"
    )
    assert ended.stderr == ""
    record = json.loads(file.read_text())
    assert (record["rank"], record["exit_code"], record["plain"]) == (1, 2, True)
    assert record["message"] == "run.yaml:3: no such key\n  hint: mend it"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is a matter of Linux")
def test_a_rank_whose_launcher_is_gone_does_not_start(tmp_path: Path) -> None:
    ended = start(tmp_path, "finish", TORCHELASTIC_RUN_ID="x", UNISONO_LAUNCHER_PID="1073741824")
    assert (ended.returncode, ended.stdout) == (1, "")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is a matter of Linux")
@pytest.mark.parametrize(("agent", "survives"), [({"TORCHELASTIC_RUN_ID": "x"}, False), ({}, True)])
def test_a_rank_dies_with_its_agent_but_not_with_a_shell(tmp_path: Path, agent: dict[str, str], survives: bool) -> None:
    """The parent ends as soon as its child is at work; the child writes a file one second later if it still lives."""
    child = (
        "import os, pathlib, time\n"
        "from unisono.worker import run_worker\n"
        "def main():\n"
        "    os.write(1, b'x')\n"
        "    time.sleep(1)\n"
        "    pathlib.Path('alive').touch()\n"
        "run_worker(main)\n"
    )
    parent = (
        "import subprocess, sys, os\n"
        "child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE)\n"
        "child.stdout.read(1)\n"
        "os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", parent, child], cwd=tmp_path, env={**os.environ, **agent}, check=True)
    time.sleep(1.7)
    assert (tmp_path / "alive").exists() is survives
