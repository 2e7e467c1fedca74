"""``unisono.train`` with faults planted: what a drill starts in the place of the ranks' own module.

A fault acts where the run tells its pulse that a phase begins. Nothing else of the run is touched.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from unisono.drill.faults import AFTER, CHECKPOINTS, Fault, Plan
from unisono.pulse import BEFORE, Pulse, open_pulse
from unisono.train import start
from unisono.worker import run_worker

FILE_BYTES = 4096  # that a file may have, once the disk is full
SLOW_SECONDS = 0.5


class Saboteur(Pulse):
    """A pulse that brings the faults of its plan."""

    plan: Plan
    rank: int

    def at(self, phase: str) -> None:
        """Enter a phase, and meet what was planted there."""
        super().at(phase)
        done = self._beat.done
        update = 0 if phase in BEFORE else done if phase in AFTER else done + 1
        for fault in self.plan.due(self.rank, update, phase):
            _ACTS[fault.kind](fault)


def _kill(_: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _segv(_: Fault) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)  # it comes at once, and nothing may go on before


def _exit(_: Fault) -> None:
    sys.exit(0)


def _leave(_: Fault) -> None:
    os._exit(0)


def _raise(fault: Fault) -> None:
    raise RuntimeError(f"planted by the drill: {fault}")


def _hang(_: Fault) -> None:
    while True:
        time.sleep(3600)


def _slow(_: Fault) -> None:
    time.sleep(SLOW_SECONDS)


def _stop(_: Fault) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _oom(fault: Fault) -> None:
    raise torch.OutOfMemoryError(f"planted by the drill: {fault}")


def _nan(_: Fault) -> None:
    def spoil(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor) and output.ndim == 0:  # the loss of the training model
            handle.remove()
            return output * float("nan")
        return None

    handle = torch.nn.modules.module.register_module_forward_hook(spoil)


def _enospc(_: Fault) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then the write fails, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, resource.RLIM_INFINITY))


def _torn(_: Fault) -> None:
    folder = Path(os.environ[CHECKPOINTS])

    def kill_while_writing() -> None:
        known = set(folder.rglob("*"))
        while not any(file.is_file() and file.stat().st_size for file in set(folder.rglob("*")) - known):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill_while_writing, daemon=True).start()


_ACTS: dict[str, Callable[[Fault], None]] = {
    "kill": _kill,
    "segv": _segv,
    "exit": _exit,
    "leave": _leave,
    "raise": _raise,
    "poison": _raise,
    "hang": _hang,
    "slow": _slow,
    "stop": _stop,
    "oom": _oom,
    "nan": _nan,
    "enospc": _enospc,
    "torn": _torn,
}


def open_saboteur() -> Pulse:
    """Open this rank's pulse with the faults that the drill planted."""
    pulse = open_pulse(Saboteur)
    assert isinstance(pulse, Saboteur)
    pulse.plan, pulse.rank = Plan.of_environment(), int(os.environ["RANK"])
    return pulse


if __name__ == "__main__":
    run_worker(lambda: start(sys.argv[1:], open_saboteur))
