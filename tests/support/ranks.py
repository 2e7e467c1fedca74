"""Real ranks for tests: forked from one warm process, each with one thread, all under a hard time limit.

``run_ranks(function, world, *args)`` calls ``function(rank, world, *args)`` in ``world`` processes that have the
environment torchrun would give them, and returns their results in rank order. ``function`` must be importable
(defined at the top of a test module). The server is forked once per test session with torch and transformers
already imported, so that a rank starts in about 50 ms instead of ten seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 60.0
# the server of Python < 3.12 does not get our sys.path, and ignores modules that it cannot import
# (pytest calls a test module tests.unit.test_x or unit.test_x, depending on how it was started: both must be found)
_here = Path(__file__).parent.parent
os.environ["PYTHONPATH"] = os.pathsep.join([str(_here), str(_here.parent), os.environ.get("PYTHONPATH", "")])
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["support.preload"])


class RankFailed(AssertionError):
    """A rank raised, died or did not answer in time."""


def free_port() -> int:
    """Ask the kernel for a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    limit: float = LIMIT_SECONDS,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Run ``function(rank, world, *args)`` on ``world`` ranks and return the results by rank."""
    port = free_port()
    ranks = []
    for rank in range(world):
        ours, theirs = _server.Pipe(duplex=False)
        process = _server.Process(
            target=_rank_main,
            args=(theirs, function, rank, world, port, args, env or {}, sys.path, os.getcwd()),
            daemon=True,
        )
        process.start()
        theirs.close()
        ranks.append((process, ours))
    try:
        return _collect(ranks, limit)
    finally:
        for process, ours in ranks:
            process.kill()
            process.join()
            ours.close()


def _collect(ranks: Sequence[tuple[Any, Connection]], limit: float) -> list[Any]:
    import time

    deadline = time.monotonic() + limit
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        waiting = {connection: rank for rank, (_, connection) in enumerate(ranks) if rank not in results}
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"ranks {sorted(waiting.values())} did not finish within {limit:.0f} s")
        for connection in ready:
            rank = waiting[connection]  # type: ignore[index]
            try:
                ok, value = connection.recv()  # type: ignore[union-attr]
            except EOFError:
                raise RankFailed(f"rank {rank} died (exit code {ranks[rank][0].exitcode})") from None
            if not ok:
                _name_the_dead(ranks, waiting)
                raise RankFailed(f"rank {rank} raised\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(ranks))]


def _name_the_dead(ranks: Sequence[tuple[Any, Connection]], waiting: dict[Connection, int]) -> None:
    """Blame a rank that was killed, if there is one: those that raise lost their connection to it, a moment earlier."""
    for rank in waiting.values():
        ranks[rank][0].join(0.5)
        if (code := ranks[rank][0].exitcode) is not None and code < 0:
            raise RankFailed(f"rank {rank} died (exit code {code})")


def _rank_main(
    pipe: Connection,
    function: Callable[..., Any],
    rank: int,
    world: int,
    port: int,
    args: Sequence[Any],
    env: dict[str, str],
    path: list[str],
    folder: str,
) -> None:
    sys.path[:] = path
    os.chdir(Path(folder))
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
        **env,
    )
    if world == 1:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name)
    import torch

    torch.set_num_threads(1)
    try:
        answer = (True, function(rank, world, *args))
    except BaseException:  # noqa: BLE001  # whatever it was, the test is told
        answer = (False, traceback.format_exc())
    pipe.send(answer)
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
