"""Start a run on this machine: decide the ranks, prepare the data, start, watch, restart, and leave nothing behind.

Refuses more ranks than GPUs, a port that is taken, and a world that the batch does not fit. ``run`` imports torch
only when it is called.
"""

from unisono.launch.run import run

__all__ = ["run"]
