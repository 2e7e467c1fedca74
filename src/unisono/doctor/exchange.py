"""A real all-reduce between real processes, under a hard time limit: the one test that nothing stands in for."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from unisono.doctor.finding import Finding

LIMIT_SECONDS = 60.0
_MIB = 16
_SET_BY_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def exchange(
    backend: str, world: int = 2, limit: float = LIMIT_SECONDS, command: Sequence[str] | None = None
) -> Finding:
    """Start ``world`` processes that add up 16 MiB over ``backend``; kill them all when ``limit`` is over."""
    name = f"exchange over {backend}"
    hint = "GLOO_SOCKET_IFNAME=lo" if backend == "gloo" else "NCCL_DEBUG=INFO (it says why), NCCL_P2P_DISABLE=1"
    with tempfile.TemporaryDirectory(prefix="unisono-doctor-") as folder:
        ranks = [_start(Path(folder), rank, world, backend, command) for rank in range(world)]
        try:
            codes = _wait(ranks, limit)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            detail = f"rank {failed[0]} failed: {_last_line(Path(folder) / f'{failed[0]}.err')}"
            return Finding(name, "fail", detail, f"try {hint}")
        if None in codes:
            return Finding(name, "fail", f"{world} ranks did not finish within {limit:.0f} s", f"try {hint}")
        seconds = float(_last_line(Path(folder) / "0.out"))  # gloo may have talked before
    return Finding(name, "ok", f"{world} ranks, sum right, {_MIB} MiB in {seconds * 1e3:.1f} ms")


def free_port() -> int:
    """Ask the kernel for a port that is free on the loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(folder: Path, rank: int, world: int, backend: str, command: Sequence[str] | None) -> subprocess.Popen[bytes]:
    port_file = folder / "port"
    if rank == 0:
        port_file.write_text(str(free_port()), encoding="ascii")
    module = command or [sys.executable, "-m", "unisono.doctor.exchange_rank"]
    environment = {name: value for name, value in os.environ.items() if name not in _SET_BY_LAUNCHERS}
    with (folder / f"{rank}.out").open("wb") as out, (folder / f"{rank}.err").open("wb") as err:
        return subprocess.Popen(
            [*module, str(rank), str(world), port_file.read_text(encoding="ascii"), backend],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**environment, "OMP_NUM_THREADS": "1"},
        )


def _wait(ranks: Sequence[subprocess.Popen[bytes]], limit: float) -> list[int | None]:
    """Wait until all are done, one has failed, or the time is over; gives the exit codes, None for the running."""
    deadline = time.monotonic() + limit
    while True:
        codes = [rank.poll() for rank in ranks]
        if None not in codes or any(codes) or time.monotonic() > deadline:
            return codes
        time.sleep(0.02)


def _last_line(file: Path) -> str:
    lines = file.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "without a word"
