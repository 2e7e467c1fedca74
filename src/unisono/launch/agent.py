"""Start ranks under torch's elastic agent, watch them, and end all of them.

The agent runs one attempt: restarts are decided by ``run``, which gives each a fresh agent and rendezvous.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from unisono.errors import LaunchError
from unisono.launch.failure import PEER_LOST, Failure
from unisono.launch.watch import Watch, signal_all
from unisono.stopping import REQUESTS, Notice

RUN_MARK = "UNISONO_RUN_ID"
LOOPBACK = "127.0.0.1"
_GRACE_SECONDS = 5  # for the kernel to end what was killed


class Stopped(Exception):
    """The launcher was asked to stop, and not for the first time or with nothing to save."""

    def __init__(self, signum: signal.Signals, *, insisted: bool) -> None:
        super().__init__(f"stopped by {signum.name}")
        self.signum = signum
        self.insisted = insisted


class Requests:
    """Requests to stop that come to the launcher.

    The first is passed on to the ranks, which save and end; those that have not within ``grace_seconds`` are killed.
    The second, or one that comes while there are no ranks, raises Stopped.
    """

    def __init__(self, grace_seconds: float) -> None:
        self._grace_seconds = grace_seconds
        self._notice = Notice(insisted=self._insist)
        self._ranks: list[int] = []
        self._timer: threading.Timer | None = None

    @property
    def asked(self) -> bool:
        """True once a request has come."""
        return self._notice.asked

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Take the signals over while inside."""
        try:
            with self._notice.answering(self._pass_on), self._notice.listening(), _agents_own_put_back():
                self._handlers = {signum: signal.getsignal(signum) for signum in REQUESTS}
                yield
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def watch_over(self, ranks: Sequence[int]) -> None:
        """Pass requests on to these processes; the agent has taken signals over in starting them."""
        self._ranks = list(ranks)
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)  # also those that nohup had switched off

    def _pass_on(self, signum: signal.Signals) -> None:
        if not self._ranks:
            raise Stopped(signum, insisted=False)
        signal_all(self._ranks, signal.SIGTERM)
        self._timer = threading.Timer(self._grace_seconds, self._kill_ranks)
        self._timer.daemon = True
        self._timer.start()

    def _kill_ranks(self) -> None:
        signal_all(self._ranks, signal.SIGKILL)

    def _insist(self, signum: signal.Signals) -> None:
        raise Stopped(signum, insisted=True)


@contextmanager
def _agents_own_put_back() -> Iterator[None]:
    """Undo what the agent does about a signal that is no request to us."""
    before = {} if sys.platform == "win32" else {signal.SIGQUIT: signal.getsignal(signal.SIGQUIT)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def start_ranks(
    command: Sequence[str], ranks: int, *, port: int, run_id: str, log_dir: str, requests: Requests, watch: Watch
) -> tuple[list[Failure], Sequence[int]]:
    """Run ``command`` on ``ranks`` ranks to the end; return those that failed, and those that ended with code 0.

    Nothing that they started is left when this returns or raises. Raises Stopped (see Requests) and LaunchError if
    the ranks cannot meet.
    """
    _quiet_agent()
    try:
        agent = _make_agent(command, ranks, port, run_id, log_dir)
        agent.requests, agent.watch = requests, watch
        try:
            result = agent.run()
        finally:
            watch.end()
            requests.watch_over([])
            agent.get_worker_group().spec.rdzv_handler.shutdown()
    except RendezvousError as error:
        raise LaunchError(f"the ranks cannot meet on {LOOPBACK}: {error}", hint="see `unisono doctor`") from error
    finally:
        _kill_marked(run_id)
    return watch.failures([_read(rank, failure) for rank, failure in result.failures.items()]), agent.ended


class _Agent(LocalElasticAgent):
    """The agent with our signals, and no patience with ranks whose peer is lost."""

    requests: Requests
    watch: Watch
    ended: Sequence[int] = ()  # ranks that were gone with exit code 0 when the agent closed

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        self.requests.watch_over(list(pids.values()))
        self.watch.begin(list(pids.values()), self._ended_well)
        if self._pcontext is not None:
            self._kill_on_close(self._pcontext)
        return pids

    def _ended_well(self) -> list[int]:
        handlers = self._pcontext.subprocess_handlers if isinstance(self._pcontext, SubprocessContext) else {}
        return [rank for rank, handler in handlers.items() if handler.proc.poll() == 0]

    def _kill_on_close(self, context: PContext) -> None:
        """End ranks by ``PEER_LOST``: the agent closes only when one has failed, and the rest waits for it in vain.

        Its own SIGTERM is a request to save to our ranks; and it would wait 30 seconds before it kills.
        """
        close = context.close

        @functools.wraps(close)
        def close_at_once(death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
            self.ended = self.ended or self._ended_well()
            close(PEER_LOST, _GRACE_SECONDS)

        context.close = close_at_once  # type: ignore[method-assign]


def _make_agent(command: Sequence[str], ranks: int, port: int, run_id: str, log_dir: str) -> _Agent:
    meeting = RendezvousParameters(
        backend="c10d",
        endpoint=str(Path(log_dir) / "rendezvous"),
        store_type="file",  # nothing listens: a store of torch's own would, on every interface
        run_id=run_id,
        min_nodes=1,
        max_nodes=1,
        local_addr=LOOPBACK,
    )
    spec = WorkerSpec(
        role="rank",
        local_world_size=ranks,
        rdzv_handler=get_rendezvous_handler(meeting),
        entrypoint=command[0],
        # the agent reads arguments as templates of its own
        args=tuple(argument.replace("$", "$$") for argument in command[1:]),
        max_restarts=0,
        master_addr=LOOPBACK,
        master_port=port or None,
        local_addr=LOOPBACK,
    )
    return _Agent(spec, DefaultLogsSpecs(log_dir=log_dir))


def _quiet_agent() -> None:
    """Keep the agent's own account of a failure off the screen, unless its level was asked for: we tell it better."""
    if "LOGLEVEL" not in os.environ and "TORCH_LOGS" not in os.environ:
        for name in ("multiprocessing.api", "agent.server.api", "agent.server.local_elastic_agent"):
            logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)


def _read(rank: int, failure: ProcessFailure) -> Failure:
    record = failure.error_file_data
    if "time_ns" in record:
        seconds = record["time_ns"] / 1e9
        return Failure(
            rank, failure.exitcode, seconds, record["message"], bool(record["plain"]), tuple(record["retry"])
        )
    return Failure(rank, failure.exitcode, float(failure.timestamp))


def _kill_marked(run_id: str) -> None:
    """Kill what the ranks of ``run_id`` left behind: their helpers have the mark in their environment."""
    if sys.platform == "win32":
        return
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_MARK) == run_id and process.pid != os.getpid():
                process.kill()
        except psutil.Error:
            continue  # it has ended, or belongs to somebody else
