"""Real launches of fake ranks: they meet, fail, start again and end."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.launching import alive, run_fake, tell_ranks
from unisono.cores import usable_cores
from unisono.errors import DataError, LaunchError


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """Mark all that a test starts; whatever the test is about, nothing of it may be left, nor a temporary folder."""
    tell_ranks(monkeypatch, tmp_path)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    signals = signal.valid_signals() - {signal.SIGALRM}  # which limits the time of a test
    handlers = [signal.getsignal(signum) for signum in signals]
    yield str(tmp_path)
    assert alive(str(tmp_path)) == []
    assert list(scratch.iterdir()) == []
    assert [signal.getsignal(signum) for signum in signals] == handlers


def test_b38_b68_ranks_start_after_the_preparation_and_share_the_cores(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The preparation takes longer than the ranks' collectives may; no rank waits for it."""
    cores = usable_cores()
    threads = max(1, cores // 2)
    started = time.time()
    plan = f"all:note:{tmp_path} all:reduce:{tmp_path} $$HOME/${{local_rank}}"
    assert run_fake(plan, ranks=2, prepare=lambda config: time.sleep(6)) == 0
    assert [(tmp_path / f"sum{rank}").read_text() for rank in range(2)] == [f"3 {threads}"] * 2
    about = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert all((tmp_path / f"rank{rank}.json").stat().st_mtime - started > 6 for rank in range(2))
    assert about[0]["environment"]["MASTER_ADDR"] == "127.0.0.1"
    assert about[0]["environment"]["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert about[0]["arguments"][-1] == "$$HOME/${local_rank}"
    assert Path(about[0]["arguments"][1]) == Path("run.yaml").absolute()
    printed = capfd.readouterr().err
    assert f"2 ranks on the CPU, threads per rank: {threads} (usable cores: {cores})" in printed
    assert "closing signal" not in printed


def test_b38_a_failed_preparation_ends_before_there_are_ranks(tmp_path: Path) -> None:
    def prepare(config: object) -> None:
        raise DataError("no record is left", where="train.jsonl")

    with pytest.raises(DataError, match="no record is left"):
        run_fake(f"all:note:{tmp_path}", ranks=2, prepare=prepare)
    assert not (tmp_path / "rank0.json").exists()


def test_b39_a_failed_rank_ends_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    """The rest does not even listen to SIGTERM, and one has a helper in a session of its own."""
    started = time.monotonic()
    plan = "0:helper 0:deaf 0:sleep:60 2:sleep:60 1:sleep:1.5 1:fail:the-weights-are-gone"
    assert run_fake(plan, ranks=3) == 1
    assert time.monotonic() - started < 15
    lines = capfd.readouterr().err.splitlines()
    assert lines[-1] == "ValueError: the-weights-are-gone"
    assert "unisono: rank 1 of 3 failed (exit code 1); the run has failed (0 of 0 restarts used)" in lines[-30:]
    assert any("fake_worker.py" in line for line in lines[-30:])
    assert len([line for line in lines if line.startswith("ValueError")]) == 1


def test_a_mistake_of_the_person_is_told_in_plain_words_and_never_tried_again(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run_fake("all:refuse:data.train_is_empty", ranks=2, restarts=3) == 2
    printed = capfd.readouterr().err
    assert printed.endswith("error: run.yaml:3: data.train_is_empty\n  hint: mend it\n")
    assert "a restart cannot mend this" in printed
    assert "Traceback" not in printed and "failed too" not in printed


def test_a_fault_is_restarted_with_a_rendezvous_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "first").mkdir()
    plan = f"1:note:{tmp_path}/first 1:fail_once:{tmp_path}/marker all:note:{tmp_path}"
    assert run_fake(plan, ranks=2, restarts=2) == 0
    printed = capfd.readouterr().err
    assert "rank 1 of 2 failed (exit code 1); starting again, restart 1 of 2" in printed
    assert "ValueError: a passing fault" in printed


def test_b64d_a_killed_rank_uses_up_the_restarts(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_fake("0:sleep:60 1:die", ranks=2, restarts=1) == 1
    printed = capfd.readouterr().err
    assert "rank 1 of 2 failed (SIGKILL); starting again, restart 1 of 1" in printed
    assert "rank 1 of 2 failed (SIGKILL); the run has failed (1 of 1 restarts used)" in printed
    assert "out of memory is the usual reason" in printed.splitlines()[-1]


def test_one_rank_takes_the_same_way(tmp_path: Path) -> None:
    assert run_fake(f"all:note:{tmp_path}", ranks=1) == 0
    about = json.loads((tmp_path / "rank0.json").read_text())
    assert about["environment"]["WORLD_SIZE"] == "1"


def test_b45_a_given_port_is_the_one_the_ranks_use_and_must_be_free(tmp_path: Path) -> None:
    import socket

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(LaunchError, match=f"port {port} is taken"):
            run_fake(f"all:note:{tmp_path}", ranks=2, port=port)
        assert time.monotonic() - started < 10
    assert not (tmp_path / "rank0.json").exists()
    assert run_fake(f"all:note:{tmp_path}", ranks=1, port=port) == 0
    about = json.loads((tmp_path / "rank0.json").read_text())
    assert about["environment"]["MASTER_PORT"] == str(port)


def test_the_launcher_is_imported_without_torch() -> None:
    import subprocess

    code = "import sys, unisono.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
