"""A stand-in for ``unisono.train``: each rank does what the plan on its command line says, in order.

A step is ``who:verb`` or ``who:verb:argument``; who is ``all`` or a rank. torch is imported by ``reduce``
alone, so that a rank starts in a blink.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from unisono.errors import ConfigError
from unisono.stopping import AGAIN, REQUESTS, notice
from unisono.worker import run_worker


def main() -> int:
    """Follow the plan; returns AGAIN if it was asked to stop by the end."""
    for step in sys.argv[2:]:
        who, verb, argument = [*step.split(":", 2), "", ""][:3]
        if who in ("all", os.environ["RANK"]):
            VERBS[verb](argument)
    return AGAIN if notice().asked else 0


def note(folder: str) -> None:
    """Write who and where this rank is to ``folder``."""
    about = {"environment": dict(os.environ), "arguments": sys.argv, "pid": os.getpid()}
    path = Path(folder) / f"rank{os.environ['RANK']}"
    path.with_suffix(".part").write_text(json.dumps(about))
    path.with_suffix(".part").replace(path.with_suffix(".json"))


def reduce(folder: str) -> None:
    """Add up rank + 1 over the ranks with gloo, under a timeout of five seconds."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=5))
    value = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(value)
    (Path(folder) / f"sum{dist.get_rank()}").write_text(f"{int(value)} {torch.get_num_threads()}")
    dist.destroy_process_group()


def fail(text: str) -> None:
    """Raise an error that nobody expects."""
    raise ValueError(text)


def refuse(text: str) -> None:
    """Raise an error of the person's making."""
    raise ConfigError(text, where="run.yaml:3", hint="mend it")


def fail_once(marker: str) -> None:
    """Raise on the first attempt only."""
    if not Path(marker).exists():
        Path(marker).touch()
        raise ValueError("a passing fault")


def copy(folders: str) -> None:
    """Copy a folder: ``from>to``."""
    source, target = folders.split(">")
    shutil.copytree(source, target, dirs_exist_ok=True)


def deaf(_: str) -> None:
    """Do not end when told."""
    for name in REQUESTS:
        signal.signal(name, signal.SIG_IGN)


def helper(_: str) -> None:
    """Leave a helper behind, in a session of its own, as careless libraries do."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)


def die(_: str) -> None:
    """End without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def sleep(seconds: str) -> None:
    """Do nothing for a while, but listen."""
    end = time.monotonic() + float(seconds)
    while time.monotonic() < end and not notice().asked:
        time.sleep(0.05)


VERBS = {
    "note": note,
    "reduce": reduce,
    "fail": fail,
    "fail_once": fail_once,
    "refuse": refuse,
    "copy": copy,
    "deaf": deaf,
    "helper": helper,
    "die": die,
    "sleep": sleep,
    "exit": lambda code: os._exit(int(code)),
}


if __name__ == "__main__":
    run_worker(main)
