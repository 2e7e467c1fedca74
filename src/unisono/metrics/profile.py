"""Look closely at a few updates: a trace of each rank by torch's profiler, and a table of its costliest operators.

Both lie in the run folder: ``profile/rank<k>.json.gz``, which chrome://tracing and ui.perfetto.dev show, and
``profile/rank<k>.txt``. What is going on in the run (data, forward, backward ...) stands in the trace by its name.
Before and after these updates, and in a run that is not looked at, nothing is done.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from unisono.durable import replace_file

FOLDER = "profile"
NUM_OPERATORS = 15
_NAME_WIDTH = 48


class Profile:
    """The profile of this rank's updates from one to another, written when the last of them is finished."""

    def __init__(self, updates: tuple[int, int] | None, run_folder: Path, *, rank: int, say: Callable[[str], None]):
        self._updates = updates
        self._file = run_folder / FOLDER / f"rank{rank}"
        self._say = say
        self._profiler: profile | None = None
        self._span: record_function | None = None
        self._names: set[str] = set()
        self._num_updates = 0

    def turns_at(self, update: int) -> bool:
        """Tell whether there is something to begin or to end before this update; each is to be asked once, in order."""
        if self._updates is None:
            return False
        first, last = self._updates
        self._num_updates += self._profiler is not None
        return (first <= update <= last) == (self._profiler is None)

    def turn(self) -> None:
        """Begin to look, or end it."""
        if self._profiler is not None:
            self.close()
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities)
        self._profiler.start()

    def enter(self, cause: str) -> None:
        """Name what begins."""
        if self._profiler is not None:
            self._leave_span()
            self._names.add(cause)
            self._span = record_function(cause)
            self._span.__enter__()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Write what was seen, if something was; rank 0 shows its table."""
        if self._profiler is None:
            return
        self._leave_span()
        self._profiler.stop()
        trace, part = self._file.with_suffix(".json.gz"), self._file.with_suffix(".part.json.gz")
        part.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(part))
        part.replace(trace)
        table = operators(self._profiler.key_averages(), self._names, num_updates=max(1, self._num_updates))
        replace_file(self._file.with_suffix(".txt"), table.encode())
        self._profiler = None
        self._say(table.rstrip())
        self._say(f"the traces of all ranks are in {trace.parent}: open one in ui.perfetto.dev")

    def _leave_span(self) -> None:
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None


def operators(events: Any, spans: set[str], *, num_updates: int) -> str:
    """Return a table of the operators with most seconds of their own, a line each.

    By the device's seconds if there are any, else by the processor's. ``spans`` are no operators.
    """
    ran = [event for event in events if event.key not in spans and event.device_type.name == "CPU"]
    on_device = any(event.self_device_time_total for event in ran)
    device, where = ("cuda", "GPU") if on_device else ("cpu", "CPU")
    costs = sorted(((_microseconds(event, device), event) for event in ran), key=lambda item: -item[0])
    whole = sum(cost for cost, _ in costs) or 1.0
    rows = [f"{'operator':<{_NAME_WIDTH}} {where + ' ms':>12} {'share':>7} {'calls':>9}   (own time an update)"]
    for cost, event in costs[:NUM_OPERATORS]:
        name = event.key if len(event.key) <= _NAME_WIDTH else event.key[: _NAME_WIDTH - 3] + "..."
        milliseconds, calls = cost / 1000 / num_updates, event.count / num_updates
        rows.append(f"{name:<{_NAME_WIDTH}} {milliseconds:>12.3f} {cost / whole:>7.1%} {calls:>9.1f}")
    return "\n".join(rows) + "\n"


def _microseconds(event: Any, device: str) -> float:
    return float(event.self_device_time_total if device == "cuda" else event.self_cpu_time_total)
