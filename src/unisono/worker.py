"""What a rank does around its main: die with its launcher, say why it failed, leave at once.

``run_worker(main)`` is the last call of a rank, under ``unisono train`` and under plain torchrun alike.
``python -m unisono.worker MODULE ARGS...`` does the same around ``python -m MODULE ARGS...``; the launcher starts
ranks that way, so that a rank is bound to its launcher before its seconds of imports.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from unisono.errors import OutOfMemoryError, UnisonoError
from unisono.pulse import answer_with_stacks
from unisono.stopping import AGAIN, notice

LAUNCHER_PID = "UNISONO_LAUNCHER_PID"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_PR_SET_PDEATHSIG = 1


def run_worker(main: Callable[[], object]) -> NoReturn:
    """Run ``main`` and end the process with its exit code: what ``main`` returns, 1, or an error's own.

    From here on a request to stop (SIGTERM, SIGINT, SIGUSR1) is noted for ``main`` to look at; a second one leaves.

    ``main`` must have taken down its process group when it returns. When it raises, nothing is taken down: clean-up
    is collective, and the peers of a failed rank will not join it.
    """
    die_with_launcher()
    faulthandler.enable()
    answer_with_stacks()
    notice().listen()
    leave(_run(main))


def die_with_launcher() -> None:
    """Ask the kernel (Linux) to kill this rank when its elastic agent dies, so that no rank trains on alone.

    Outside an agent nothing is done: a run that was started from a shell may outlive that shell.
    """
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is not None and os.getppid() != int(launcher):
        os._exit(1)  # it had died before the kernel was asked


def leave(code: int) -> NoReturn:
    """Flush and end the process without destructors.

    A failed rank would wait in them for its peers, and gloo can abort in them after all work is done.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _run(main: Callable[[], object]) -> int:
    try:
        code = main()
    except KeyboardInterrupt:
        return AGAIN  # nothing had been trained that is not saved
    except SystemExit as leaving:
        return _system_exit(leaving)
    except OutOfMemoryError as error:
        return _report(str(error), error.exit_code, plain=True, retry=error.retry_with)
    except UnisonoError as error:
        return _report(str(error), error.exit_code, plain=True)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            return _report(traceback.format_exc(), 1, plain=False)
        what = f"{error.filename or 'a file of the run'} cannot be written: {error.strerror}"
        return _report(f"{what}\n  hint: make room; the run then goes on from its newest checkpoint", 1, plain=True)
    except BaseException:  # noqa: BLE001 - the edge of the process: whatever it was is told, and the process ends
        return _report(traceback.format_exc(), 1, plain=False)
    return code if isinstance(code, int) else 0


def _system_exit(leaving: SystemExit) -> int:
    if leaving.code in (None, 0):  # the work's own end is to return
        return _report("the rank left by sys.exit(0) before its work was done", 1, plain=True)
    if isinstance(leaving.code, int):
        return leaving.code
    return _report(str(leaving.code), 1, plain=True)


def _report(text: str, exit_code: int, *, plain: bool, retry: Sequence[str] = ()) -> int:
    """Leave the error where the agent looks for it; print it unless our launcher will."""
    now = time.time_ns()
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        _write_record(Path(path), text, exit_code, plain, now, retry)
    if not path or LAUNCHER_PID not in os.environ:
        print(_heading(plain) + text.rstrip(), file=sys.stderr, flush=True)
    return exit_code


def _write_record(path: Path, text: str, exit_code: int, plain: bool, now: int, retry: Sequence[str]) -> None:
    """Write the error file whole or not at all; ``message`` and ``timestamp`` (seconds) are torch's own fields."""
    record = {
        "message": text,
        "timestamp": now // 10**9,
        "time_ns": now,
        "rank": int(os.environ.get("RANK", "0")),
        "exit_code": exit_code,
        "plain": plain,
        "retry": list(retry),
    }
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(record), encoding="utf-8")
    draft.replace(path)


def _heading(plain: bool) -> str:
    rank = os.environ.get("RANK")
    of_rank = "" if rank is None else f"rank {rank} of {os.environ.get('WORLD_SIZE', '?')}:"
    return f"{of_rank} error: ".lstrip() if plain else f"{of_rank}\n".lstrip()


def _main() -> NoReturn:
    module = sys.argv.pop(1)
    run_worker(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))


if __name__ == "__main__":
    _main()
