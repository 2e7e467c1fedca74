"""``unisono plan --calibrate``: time the operations of an update on this machine, by one rank and by two at a time.

The ranks get the environment that a run's ranks get (threads, allocator), so that the times are those of a run. Written
for GPUs too, where nobody has checked it yet.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from unisono.allocator import find_allocator
from unisono.config.schema import LaunchSection
from unisono.doctor.exchange import free_port
from unisono.errors import LaunchError
from unisono.launch.environment import rank_environment
from unisono.launch.ranks import look_at_machine
from unisono.plan.machine import Measured, Rates, Table, fit_exchange, machine_file, this_machine, write_measured


@dataclass(frozen=True)
class Extent:
    """Which sizes are timed, and for how long each."""

    tokens: Sequence[int] = (64, 1024)
    widths: Sequence[int] = (8, 64, 512, 4096)
    lengths: Sequence[int] = (32, 128, 512, 2048)
    heads: Sequence[int] = (32, 128)
    values: Sequence[int] = (2**13, 2**17, 2**21, 2**24)
    messages: Sequence[int] = (2**12, 2**16, 2**20, 2**22, 25 * 2**20)
    updates: int = 12  # of tiny models; and exchanges of each size
    budget_seconds: float = 0.012


@dataclass(frozen=True)
class Line:
    """What a rank says: a table by its name, or ``facts``, or ``exchange``."""

    name: str
    value: Any


UNSTEADY = 0.15  # between two times of the same: other work disturbs


def calibrate(
    ranks: Sequence[int], say: Callable[[str], None], *, extent: Extent | None = None, file: Path | None = None
) -> Measured:
    """Measure with each number of ranks and write the file. Raises LaunchError if a rank fails."""
    machine, file = look_at_machine(), file or machine_file()
    usable = [number for number in ranks if not machine.gpus or number <= machine.gpus]
    found: list[Rates] = []
    facts: dict[str, Any] = {}
    for number in usable:
        rates, facts = _measure(number, extent or Extent(), say)
        found.append(rates)
    measured = Measured(
        this_machine(facts.get("device")),
        datetime.now(timezone.utc).isoformat(timespec="seconds"),
        tuple(found),
        on_gpu=machine.gpus > 0,
        has_bf16=facts["has_bf16"],
        memory_bytes=facts.get("memory_bytes", 0),
    )
    write_measured(measured, file)
    say(f"calibrate: {file}")
    return measured


def _measure(number: int, extent: Extent, say: Callable[[str], None]) -> tuple[Rates, dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="unisono-calibrate-") as folder:
        processes = _start(number, extent, Path(folder))
        try:
            lines = _listen(processes[0], number, say)
            codes = [process.wait(timeout=60) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()
        if any(codes):
            rank = next(rank for rank, code in enumerate(codes) if code)
            told = (Path(folder) / f"{rank}.err").read_text(encoding="utf-8", errors="replace").strip()
            raise LaunchError(f"rank {rank} of the calibration failed: {told}", hint="see `unisono doctor`")
    facts, messages = lines.pop("facts"), lines.pop("exchange", None)
    tables = {name: Table(tuple(map(tuple, each["axes"])), tuple(each["seconds"])) for name, each in lines.items()}
    apart = statistics.median(each["again"] for each in lines.values())
    if apart > UNSTEADY:
        say(f"calibrate: a second time, times were {apart:.0%} apart: something else works here, do it when it is idle")
    alpha, beta = (0.0, 0.0) if messages is None else fit_exchange(*zip(*messages, strict=True))
    return Rates(number, facts["threads"], tables, alpha, beta), facts


def environment_of_ranks(number: int) -> dict[str, str]:
    """Return the environment that a run gives so many ranks on this machine, but for their places."""
    machine = look_at_machine()
    allocator = find_allocator() if not machine.gpus and sys.platform == "linux" else None
    given = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    decided = rank_environment(
        LaunchSection(), number, machine, inherited=given, platform=sys.platform, allocator=allocator
    )
    return {**given, **decided.variables}


def _start(number: int, extent: Extent, folder: Path) -> list[subprocess.Popen[str]]:
    environment = environment_of_ranks(number)
    command = [sys.executable, "-W", "ignore", "-m", "unisono.bench.calibrate_rank", json.dumps(asdict(extent))]
    port, processes = free_port(), []
    for rank in range(number):
        place = {
            "RANK": rank, "WORLD_SIZE": number, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": number,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        told = {name: str(value) for name, value in place.items()}
        with (folder / f"{rank}.err").open("wb") as err:
            out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            process = subprocess.Popen(command, env=environment | told, stdout=out, stderr=err, text=True)
        processes.append(process)
    return processes


def _listen(first: subprocess.Popen[str], number: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Collect what rank 0 says, and pass on how far it has come."""
    assert first.stdout is not None, "it was given a pipe"
    found: dict[str, Any] = {}
    for text in first.stdout:
        if not text.startswith('{"name"'):
            continue  # a library talks
        line = Line(**json.loads(text))
        if line.name == "progress":
            say(f"calibrate: {number} rank{'s' if number > 1 else ''} at a time: {line.value}")
        else:
            found[line.name] = line.value
    return found
