"""Start ranks under torch's elastic agent, watch them, and end all of them.

The agent runs one attempt: restarts are decided by ``run``, which gives each a fresh agent and rendezvous.
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from unisono.errors import LaunchError
from unisono.launch.failure import Failure

RUN_MARK = "UNISONO_RUN_ID"
LOOPBACK = "127.0.0.1"
STOP_SIGNALS = tuple(
    known for known in signal.Signals if known.name in {"SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"}
)
_GRACE_AFTER_FAILURE_SECONDS = 5
_GRACE_AFTER_SIGNAL_SECONDS = 10


class Stopped(Exception):
    """The launcher was asked to stop by a signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


def start_ranks(command: Sequence[str], ranks: int, *, port: int, run_id: str, log_dir: str) -> list[Failure]:
    """Run ``command`` on ``ranks`` ranks to the end and return those that failed.

    Nothing that they started is left when this returns or raises. Raises Stopped for a signal and LaunchError if
    the ranks cannot meet.
    """
    _quiet_agent()
    try:
        agent = _make_agent(command, ranks, port, run_id, log_dir)
        try:
            result = agent.run()
        finally:
            agent.get_worker_group().spec.rdzv_handler.shutdown()
    except SignalException as stop:
        raise Stopped(stop.sigval) from None
    except RendezvousError as error:
        raise LaunchError(f"the ranks cannot meet on {LOOPBACK}: {error}", hint="see `unisono doctor`") from error
    finally:
        _kill_marked(run_id)
    return [_read(rank, failure) for rank, failure in result.failures.items()]


@contextmanager
def stop_signals() -> Iterator[None]:
    """Let the stop signals raise inside, as the agent expects them, and put the old handlers back."""
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    _handle_signals(before)
    try:
        yield
    except SignalException as stop:
        raise Stopped(stop.sigval) from None
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _handle_signals(before: dict[signal.Signals, Any]) -> None:
    """Raise on every stop signal but those that were ignored: under nohup a hang-up must stay ignored."""
    for signum, handler in before.items():
        signal.signal(signum, signal.SIG_IGN if handler is signal.SIG_IGN else _raise)


def _raise(signum: int, frame: FrameType | None) -> None:
    raise SignalException(f"got {signal.Signals(signum).name}", signal.Signals(signum))


class _Agent(LocalElasticAgent):
    """The agent with our signals and our patience."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        handlers = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
        pids: dict[int, Any] = super()._start_workers(worker_group)
        for signum, handler in handlers.items():
            signal.signal(signum, handler)  # it has just taken signals over, also those that nohup had switched off
        if self._pcontext is not None:
            _limit_grace(self._pcontext)
        return pids


def _limit_grace(context: PContext) -> None:
    """Kill ranks that do not end soon: the agent waits 30 seconds by default, whatever it was told.

    After a failure (it names no signal then) the rest waits in vain for the lost rank. After a signal ranks may be
    saving: torch's own variable TORCH_ELASTIC_SHUTDOWN_TIMEOUT gives them longer.
    """
    patience = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _GRACE_AFTER_SIGNAL_SECONDS))
    close = context.close

    @functools.wraps(close)
    def close_soon(death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        close(death_sig, _GRACE_AFTER_FAILURE_SECONDS if death_sig is None else patience)

    context.close = close_soon  # type: ignore[method-assign]


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
        return Failure(rank, failure.exitcode, seconds, record["message"], bool(record["plain"]))
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
