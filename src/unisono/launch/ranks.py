"""How many ranks to start: asked of torch, never of CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import os
from dataclasses import dataclass

from unisono.config.schema import RunConfig, range_of
from unisono.cores import usable_cores


@dataclass(frozen=True)
class Machine:
    """What there is to train on; ``notes`` is what the person should know about it."""

    gpus: int
    cores: int
    notes: tuple[str, ...] = ()


def look_at_machine() -> Machine:
    """Ask torch for its GPUs and the system for the cores that this process may use."""
    import torch

    gpus = torch.cuda.device_count()
    built_for_gpus = torch.version.cuda is not None or torch.version.hip is not None
    return Machine(gpus, usable_cores(), (_no_gpu_note(),) if built_for_gpus and gpus == 0 else ())


def _no_gpu_note() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    because = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
    return f"torch is built for GPUs but sees none{because}: this run uses the CPU"


def decide_ranks(config: RunConfig, machine: Machine, *, fewer: int = 0) -> int:
    """Return the number of ranks: as asked; else one per GPU, or on a CPU one per two usable cores.

    Of a range, as many as there are GPUs (or usable cores), and ``fewer`` than that if it leaves the choice.
    """
    if (choice := range_of(config.launch.ranks)) is not None:
        fewest, most = choice
        return max(fewest, min(most, machine.gpus or machine.cores) - fewer)
    if isinstance(config.launch.ranks, int):
        return config.launch.ranks
    if config.strategy.name == "single":
        return 1
    return machine.gpus or max(1, machine.cores // 2)
