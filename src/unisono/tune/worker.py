"""``unisono.train`` until the last update is measured: what a trial starts in the place of the ranks' own module.

Nothing is validated, saved or handed over at the end, which can take longer than the updates. And a trial that runs out
of memory has failed: it does not go on with less.
"""

from __future__ import annotations

import sys
from pathlib import Path

from unisono import dist
from unisono.config.load import load
from unisono.errors import OutOfMemoryError, UnisonoError
from unisono.pulse import LEFT, Pulse, open_pulse
from unisono.train import start
from unisono.worker import run_worker


class Measured(Exception):
    """The last update is done and written down."""


class Stopwatch(Pulse):
    """A pulse that ends the run when its last update is finished."""

    last = 0

    def finished(self, update: int) -> None:
        """Tell that ``update`` updates are finished, and leave after the last."""
        super().finished(update)
        if update == self.last:
            raise Measured


def measure(arguments: list[str]) -> int:
    """Train until all updates are measured; every rank leaves then, and none before the others are as far."""
    pulse = open_pulse(Stopwatch)
    assert isinstance(pulse, Stopwatch)
    pulse.last = load(Path(arguments[0]), arguments[1:]).config.length.updates or 0
    try:
        return start(arguments, lambda: pulse)
    except OutOfMemoryError as error:
        raise UnisonoError(str(error)) from error
    except Measured:
        pass  # its frames hold the model, which goes before the group does
    dist.wait_for_all()
    dist.leave()
    pulse.at(LEFT)
    return 0


if __name__ == "__main__":
    run_worker(lambda: measure(sys.argv[1:]))
