"""Die by SIGKILL, or meet an error, at the n-th thing that a save does to the disk.

Those are every open for writing, sync, rename, mkdir, remove. Python's audit events see them all before they happen,
whoever does them (unisono, torch, shutil); a sync has no event and is wrapped. At a sync there are two ways to die:
with the file as written, and with half of it. An error (``ENOSPC`` ...) is raised in the place of the deed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Deeds:
    """Notes what is done below ``folder`` while ``watching``; kills the process at deed number ``fatal`` (from 0).

    With ``error`` that deed fails instead.
    """

    def __init__(self, folder: Path, fatal: int | None = None, *, tear: bool = False, error: int = 0) -> None:
        self.names: list[str] = []
        self.watching = False
        self._folder = str(folder)
        self._fatal = fatal
        self._tear = tear
        self._error = error
        self._sync = os.fsync
        os.fsync = self._fsync
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.watching:
            return
        if event == "open" and not isinstance(args[0], int) and (args[2] or 0) & WRITES:
            self._note("open", args[0])
        elif event == "os.rename":
            self._note("rename", args[1])
        elif event == "os.mkdir":
            self._note("mkdir", args[0], args[2])
        elif event in {"os.remove", "os.rmdir"}:
            self._note(event.removeprefix("os."), args[0], args[1])

    def _note(self, what: str, path: str | os.PathLike[str], folder_handle: int = -1, tear: int | None = None) -> None:
        whole = os.path.join(os.readlink(f"/proc/self/fd/{folder_handle}") if folder_handle >= 0 else "", path)
        if not whole.startswith(self._folder):
            return
        self.names.append(f"{what} {os.path.relpath(whole, self._folder)}")
        if len(self.names) - 1 == self._fatal:
            if tear is not None and self._tear:
                os.ftruncate(tear, os.fstat(tear).st_size // 2)
            if self._error:
                raise OSError(self._error, os.strerror(self._error), whole)
            os.kill(os.getpid(), signal.SIGKILL)

    def _fsync(self, handle: Any) -> None:
        number = handle if isinstance(handle, int) else handle.fileno()
        path = os.readlink(f"/proc/self/fd/{number}")
        if self.watching:
            self._note("sync", path, tear=number if os.path.isfile(path) else None)
        self._sync(handle)


def watch_save(deeds: Deeds, update: int) -> Callable[..., None]:
    """Return a ``Saver.save`` that is watched at ``update``, until what it has begun in the background is done."""
    from unisono.saving import Saver

    save = Saver.save

    def watched(self: Saver, state: Any, *, wait: bool) -> None:
        self.wait()
        deeds.watching = state.update == update
        save(self, state, wait=wait or deeds.watching)
        deeds.watching = False

    return watched
