"""Seconds that go through host memory: copies between it and a GPU, and an optimizer that steps there.

Assumptions, not measurements: nothing of it is hidden behind the GPU's work, though torch tries to.
"""

from __future__ import annotations

from unisono.plan.memory import Load, base_bytes, block_inputs

COPIES = 25e9  # bytes a second between pinned host memory and a GPU: 16 lanes of PCIe 4
STEPS = 20e9  # bytes a second that an optimizer on the CPU reads and writes for one of several ranks


def host_seconds(load: Load, num_micro: int) -> float:
    """Return what an update of ``num_micro`` micro-batches waits for host memory: 0 where nothing lies there.

    Blocks' inputs go there in forward and come back. A rank's part of all weights comes as often as it is gathered, its
    part of the gradients goes after an exchange; its optimizer reads gradients, and reads and writes the rest.
    """
    copied = 2.0 * block_inputs(load) * num_micro if load.recompute == "offload" and load.on_gpu else 0.0
    if not load.offloads:
        return copied / COPIES
    num_exchanges = num_micro if load.exchanges_always else 1
    num_gathers = (1 if load.keeps_gathered else 2) * num_micro
    copied += (num_gathers * base_bytes(load) + load.trained_bytes * num_exchanges) / load.parts
    stepped = (2 * load.moments_bytes + 3 * load.trained_bytes) / load.parts
    return copied / COPIES + stepped / STEPS
