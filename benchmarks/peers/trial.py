"""One trial: start a contestant on a job, wait for it, read its answer."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from contestants import Contestant
from job import RESULT, Job
from machine import load_average, mimalloc

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Trial:
    """A contestant's answer: per update seconds, useful tokens and loss; the peak memory of its largest process."""

    contestant: str
    round: int
    seconds: list[float]
    tokens: list[int]
    losses: list[float]
    peak_bytes: int
    load: float

    def speed(self, warmup: int) -> float:
        """Useful tokens a second after the first ``warmup`` updates."""
        return sum(self.tokens[warmup:]) / sum(self.seconds[warmup:])


def run_trial(contestant: Contestant, job: Job, number: int, limit_seconds: float) -> Trial:
    """Run it to its end; SystemExit with the end of its output when it fails or takes longer than the limit."""
    load = load_average()
    log = Path(job.folder) / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            _command(contestant, job),
            env=_environment(contestant, job),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code, peak_bytes = _wait(process, limit_seconds)
        except BaseException:  # whatever ends the driver ends the trial: no rank trains on alone
            _stop(process)
            raise
    text = log.read_text(errors="replace")
    answers = [line[len(RESULT) :] for line in text.splitlines() if line.startswith(RESULT)]
    if code or not answers:
        tail = "\n".join(text.splitlines()[-20:])
        raise SystemExit(f"error: {job.contestant} ended with {code}; the end of {log}:\n{tail}")
    values = json.loads(answers[-1])
    return Trial(job.contestant, number, values["seconds"], values["tokens"], values["losses"], peak_bytes, load)


def _command(contestant: Contestant, job: Job) -> list[str]:
    script = [str(HERE / contestant.script), str(job.write())]
    if contestant.launches:
        return [sys.executable, *script]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(job.ranks),
        "--master-addr=127.0.0.1",
        f"--master-port={_free_port()}",
        *script,
    ]


def _free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _environment(contestant: Contestant, job: Job) -> dict[str, str]:
    """Return the same for all: the cores shared out to the ranks, gloo on the loopback, no network."""
    threads = max(1, len(os.sched_getaffinity(0)) // job.ranks)
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    variables.pop("LD_PRELOAD", None)
    if contestant.preloaded and not contestant.launches:
        variables["LD_PRELOAD"] = str(mimalloc())
        variables["MIMALLOC_PURGE_DELAY"] = "-1"  # its best: pages that are free for a second are kept nevertheless
    return variables


def _wait(process: subprocess.Popen[bytes], limit_seconds: float) -> tuple[int, int]:
    """Return exit code and peak resident bytes of the largest process of the trial.

    The kernel keeps the largest of a child and of all that it has waited for itself (getrusage(2), ru_maxrss).
    """
    deadline = time.monotonic() + limit_seconds
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode, usage.ru_maxrss * 1024
        if time.monotonic() > deadline:
            raise SystemExit(f"error: a trial took longer than {limit_seconds:.0f} seconds and was stopped")
        time.sleep(0.2)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the launcher to stop its ranks; a minute later end what is left of the trial's processes."""
    deadline = time.monotonic() + 60
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)  # raises once the group has nobody left
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGKILL)
