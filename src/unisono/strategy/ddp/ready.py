"""When this rank's gradients were all there, and how long its last backward went on after that.

What follows that moment is no work of this rank: the exchange that was not hidden behind backward, and the wait for
ranks that were slower.
"""

from __future__ import annotations

import time

import torch


class Readiness:
    """Hears of each gradient as it is added up; on a GPU it is the device's moments that count."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.used: set[torch.Tensor] = set()
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_gpu else []  # type: ignore[no-untyped-call]
        self._moments = [0.0, 0.0]

    def begin(self) -> None:
        """Begin a backward."""
        self.used.clear()
        self._mark(0)

    def gradient(self, parameter: torch.Tensor) -> None:
        """Hear that a parameter has its gradient: the last one counts."""
        self.used.add(parameter)
        self._mark(0)

    def over(self) -> None:
        """Hear that backward, and with it the exchange, is over."""
        self._mark(1)

    def seconds_after(self) -> float:
        """Return the seconds from the last gradient to the end; on a GPU the device must have come there."""
        if self._events:
            return float(self._events[0].elapsed_time(self._events[1])) / 1000
        return self._moments[1] - self._moments[0]

    def _mark(self, which: int) -> None:
        if self._events:
            self._events[which].record()
        else:
            self._moments[which] = time.perf_counter()
