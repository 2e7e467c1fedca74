"""One trial: start a contestant on a job, wait for it, read its answer."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from contestants import Contestant
from job import RESULT, Job
from machine import mimalloc

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Trial:
    """A contestant's answer, or why there is none: ``failure`` is the error that it ended with.

    Per update wall seconds and useful tokens; from its start to the end of its first update ``first_seconds``; the
    loss of the trained model on the held-out samples, and by the reference that of the untrained one; the peak
    memory of its largest process.
    """

    cell: str
    contestant: str
    round: int
    settings: dict[str, object]
    load: float
    took: float = 0.0
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    first_seconds: float = 0.0
    loss: float = 0.0
    loss_before: float | None = None
    peak_bytes: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    failure: str | None = None

    def speed(self, warmup: int) -> float:
        """Useful tokens a second after the first ``warmup`` updates."""
        return sum(self.tokens[warmup:]) / sum(self.seconds[warmup:])


def run_trial(contestant: Contestant, job: Job, blank: Trial, limit_seconds: float) -> Trial:
    """Run it to its end, and fill the blank in; TimeoutError when it takes longer than the limit."""
    python = python_of(contestant.environment)
    if not python.exists():
        return replace(blank, failure=f"not installed: {_reason(python.parents[1].with_suffix('.log'))}")
    log = Path(job.folder) / "log.txt"
    began = time.time()
    with log.open("w") as output:
        process = subprocess.Popen(
            _command(python, contestant, job),
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
    took = time.time() - began
    answers = [line[len(RESULT) :] for line in log.read_text(errors="replace").splitlines() if line.startswith(RESULT)]
    if code or not answers:
        return replace(blank, took=took, failure=_reason(log))
    values = json.loads(answers[-1])
    first_seconds = values.pop("first_at") - began
    return replace(blank, took=took, first_seconds=first_seconds, peak_bytes=peak_bytes, **values)


def python_of(environment: str) -> Path:
    """Return the interpreter of an environment: they lie side by side, named after the one that runs this."""
    here = Path(sys.prefix)
    return here.with_name(f"{here.name}-{environment}") / "bin/python" if environment else Path(sys.executable)


def _reason(log: Path) -> str:
    """Return what a log says went wrong: the first error, for others follow from it; else its last line."""
    if not log.exists():
        return f"{log.name} says nothing"
    lines = [re.sub(r"^\[rank\d+\]:\s*", "", line).strip() for line in log.read_text(errors="replace").splitlines()]
    errors = [line for line in lines if re.match(r"(error: |ERROR: |[\w.]*(Error|Exception|Exit)\b:)", line)]
    return (errors[:1] or lines or ["no output"])[-1][:300]


def _command(python: Path, contestant: Contestant, job: Job) -> list[str]:
    script = [str(HERE / contestant.script), str(job.write())]
    if contestant.launches:
        return [str(python), *script]
    return [
        str(python),
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
        "NO_COLOR": "1",
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
            raise TimeoutError(f"took longer than {limit_seconds:.0f} seconds and was stopped")
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
