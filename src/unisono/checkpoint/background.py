"""Save while training goes on: the copy is taken at once, the writing happens in a thread.

What is written is the copy, so that the next update cannot reach it. The thread has a process group of its own. A
checkpoint is published, and old ones are purged, by the thread and after everything is on disk; what failed there is
raised by the next ``check``, ``wait`` or ``save``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch.distributed.checkpoint.staging import BlockingAsyncStager

Tensors = dict[str, torch.Tensor]


class Copies:
    """Copies tensors to the memory of the CPU; sharded ones stay sharded.

    A copy of what lies there already is made in the memory of the copy before: fresh memory costs more than copying.
    """

    def __init__(self) -> None:
        self._kept: Tensors = {}

    @torch.no_grad()
    def take(self, tensors: Tensors) -> Tensors:
        """Return the copy; it is the former one's memory, so that one must not be in use any more."""
        if any(tensor.device.type != "cpu" for tensor in tensors.values()):
            return _staged(tensors)
        if not _alike(tensors, self._kept):
            self._kept = {}  # before the new ones are there
            self._kept = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            self._kept[name].copy_(tensor)
        return self._kept


def _alike(these: Tensors, those: Tensors) -> bool:
    return these.keys() == those.keys() and all(
        these[name].shape == those[name].shape and these[name].dtype == those[name].dtype for name in these
    )


def _staged(tensors: Tensors) -> Tensors:
    """Copy with torch's own stager, which hands out what lies on the CPU already as it is."""
    staged: Tensors = BlockingAsyncStager(cache_staged_state_dict=False).stage(tensors)
    return {name: each.clone() if tensors[name].device.type == "cpu" else each for name, each in staged.items()}


class Background:
    """Runs one save at a time beside training."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._saving: Future[float] | None = None
        self._copies = Copies()
        self.seconds = 0.0  # that the last finished save took, copy not counted

    def save(self, tensors: Tensors, write: Callable[[Tensors], object]) -> None:
        """Wait for the save before, copy ``tensors``, and let ``write`` have the copy in the thread."""
        self.wait()
        self._saving = self._executor.submit(_timed, write, self._copies.take(tensors))

    @property
    def is_busy(self) -> bool:
        """True until the newest save is known to have ended: ``check`` and ``wait`` see that."""
        return self._saving is not None

    def check(self) -> None:
        """Raise what the save raised, if it has ended in an error; never waits."""
        if self._saving is not None and self._saving.done():
            self.wait()

    def wait(self) -> None:
        """Return when nothing is being saved; raises what the save raised."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            self.seconds = saving.result()


def _timed(write: Callable[[Tensors], object], tensors: Tensors) -> float:
    begin = time.monotonic()
    write(tensors)
    return time.monotonic() - begin
