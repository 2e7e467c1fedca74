"""Replicas: every rank has the whole model; gradients are summed while backward runs, once per update."""

from __future__ import annotations

import inspect
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from unisono.strategy.contract import clip_gradients


class Ddp:
    """torch's DistributedDataParallel with a SUM in place of its mean.

    Parameters that a rank did not use in an update (an expert without tokens, say) count as zero there; torch looks for
    them in each exchange, which takes milliseconds and spares a hang.
    """

    name = "ddp"
    forward_is_collective = False

    def __init__(self, *, bucket_mib: int) -> None:
        self._bucket_mib = bucket_mib
        self._trainable: list[torch.nn.Parameter] = []
        self._wrapped: DistributedDataParallel | None = None

    def shard(self, model: torch.nn.Module) -> torch.nn.Module:
        """Collective. Wrap the model; rank 0's weights are sent to all."""
        self._trainable = [p for p in model.parameters() if p.requires_grad]
        device = self._trainable[0].device
        self._wrapped = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            **_no_buffer_exchange(),
            gradient_as_bucket_view=True,
            find_unused_parameters=True,
            bucket_cap_mb=self._bucket_mib,
        )
        self._wrapped.register_comm_hook(None, _sum)
        # torch warns once when it looked for unused parameters and found none: that is what we hope for
        warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
        return self._wrapped

    def microbatch(self, last: bool) -> AbstractContextManager[object]:
        """Exchange in the last micro-batch only."""
        assert self._wrapped is not None
        return nullcontext() if last else self._wrapped.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        """Collective in the last micro-batch. Add the gradients of ``loss``."""
        loss.backward()  # type: ignore[no-untyped-call]

    def clip(self, max_norm: float | None) -> float:
        """Clip by the global norm; all ranks hold the same whole gradients, so no exchange is needed."""
        return clip_gradients(self._trainable, max_norm)

    def describe(self) -> dict[str, object]:
        """Say how gradients travel."""
        return {"strategy": self.name, "ranks": dist.get_world_size(), "bucket_mib": self._bucket_mib}


def _no_buffer_exchange() -> dict[str, Any]:
    """Rotary tables need no exchange in every forward; torch renamed the switch in 2.13."""
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False}


def _sum(_, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations, and not as text
    """Sum a bucket over ranks; DDP's own reduction would divide by the number of ranks."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
