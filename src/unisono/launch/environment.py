"""The environment of the ranks, built as a plain dictionary: what the run file says, then what the person's own
environment says, then what is best for this machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from unisono.allocator import KNOWN
from unisono.config.schema import LaunchSection
from unisono.launch.ranks import Machine

_LOOPBACK = {"linux": "lo", "darwin": "lo0"}


@dataclass(frozen=True)
class RankEnvironment:
    """Variables to set for the ranks, on top of the launcher's own, and what to tell the person about them."""

    variables: dict[str, str]
    notes: tuple[str, ...]


def rank_environment(
    launch: LaunchSection,
    ranks: int,
    machine: Machine,
    *,
    inherited: Mapping[str, str],
    platform: str,
    allocator: Path | None,
) -> RankEnvironment:
    """Build the variables of ``ranks`` ranks on ``machine``; ``allocator`` is the library found, if any."""
    given = {**inherited, **launch.env}
    threads, thread_note = _threads(launch, ranks, machine, given)
    variables = {"OMP_NUM_THREADS": threads, **_defaults(machine, given, platform)}
    preload = _preload(launch, machine, given, platform, allocator)
    if preload is not None:
        variables["LD_PRELOAD"] = preload
        # mimalloc alone reads them: keep freed pages, the next update needs them again; and take large ones
        for name, value in (("MIMALLOC_PURGE_DELAY", "-1"), ("MIMALLOC_ALLOW_LARGE_OS_PAGES", "1")):
            variables[name] = given.get(name, value)
    variables.update(launch.env)
    device = f"{machine.gpus} GPUs" if machine.gpus else "the CPU"
    notes = [f"{ranks} rank{'s' if ranks > 1 else ''} on {device}, {thread_note}", *machine.notes]
    if preload is not None:
        notes.append(f"memory allocator of the ranks: {allocator} (launch.allocator=none keeps the system's)")
    return RankEnvironment(variables, tuple(notes))


def _threads(launch: LaunchSection, ranks: int, machine: Machine, given: Mapping[str, str]) -> tuple[str, str]:
    """Return OMP_NUM_THREADS and the words for it."""
    if launch.threads != "auto":
        return str(launch.threads), f"threads per rank: {launch.threads} (launch.threads)"
    if "OMP_NUM_THREADS" in given:
        source = "launch.env" if "OMP_NUM_THREADS" in launch.env else "your environment"
        return given["OMP_NUM_THREADS"], f"threads per rank: {given['OMP_NUM_THREADS']} (OMP_NUM_THREADS of {source})"
    threads = max(1, machine.cores // ranks)
    return str(threads), f"threads per rank: {threads} (usable cores: {machine.cores})"


def _defaults(machine: Machine, given: Mapping[str, str], platform: str) -> dict[str, str]:
    """Return what is set unless somebody has set it."""
    defaults = {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # rank 0 hosts its own store: a shared one is not announced again to an agent that joins later
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    if platform == "win32":
        defaults["USE_LIBUV"] = "0"  # torch's Windows wheels are built without libuv
    if machine.gpus:
        # end the process on a failed collective without waiting for its communicators (the agent's own default is 1)
        defaults["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "3"
    if platform in _LOOPBACK:
        # gloo would bind where the host name resolves to, which need not be reachable, or be this machine at all
        defaults["GLOO_SOCKET_IFNAME"] = _LOOPBACK[platform]
    return {name: given.get(name, value) for name, value in defaults.items()}


def _preload(
    launch: LaunchSection, machine: Machine, given: Mapping[str, str], platform: str, allocator: Path | None
) -> str | None:
    """Return LD_PRELOAD with the allocator behind what is there, or None to leave it alone."""
    if launch.allocator == "none" or allocator is None or platform != "linux" or machine.gpus:
        return None
    if "LD_PRELOAD" in launch.env or any(name in given.get("LD_PRELOAD", "") for name in KNOWN):
        return None
    present = given.get("LD_PRELOAD", "").strip()
    return f"{present}:{allocator}" if present else str(allocator)


@contextmanager
def applied(variables: Mapping[str, str]) -> Iterator[None]:
    """Set ``variables`` in this process, whose environment the agent copies for the ranks; undo it afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
