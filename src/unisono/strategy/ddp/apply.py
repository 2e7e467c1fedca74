"""Replicas: every rank has the whole model; gradients are summed while backward runs, once per update."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from unisono.dist import deal
from unisono.errors import ModelError
from unisono.strategy.contract import StepAlone, clip_gradients
from unisono.strategy.ddp.ready import Readiness
from unisono.strategy.ddp.share import share_out


class Ddp:
    """torch's DistributedDataParallel with a SUM in place of its mean.

    A parameter that takes no part in a rank's last micro-batch would leave the other ranks waiting for its gradient.
    ``unused="refuse"``: such a rank raises and names it. ``unused="zero"``: torch looks for them in each exchange.
    ``share_optimizer``: see ``share``.
    """

    name = "ddp"
    forward_is_collective = False

    def __init__(self, *, bucket_mib: int, unused: str, share_optimizer: bool) -> None:
        self._bucket_mib = bucket_mib
        self._unused = unused
        self._shares = share_optimizer
        self._keeper: dict[torch.nn.Parameter, int] = {}
        self._names: dict[torch.nn.Parameter, str] = {}
        self._ready = Readiness(torch.device("cpu"))
        self._exchanges = True
        self._wrapped: DistributedDataParallel | None = None

    def shard(self, model: torch.nn.Module) -> torch.nn.Module:
        """Collective. Wrap the model; rank 0's weights are sent to all."""
        self._names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self._keeper = dict(zip(self._names, deal([each.nbytes for each in self._names], dist.get_world_size())))
        device = next(iter(self._names)).device
        self._ready = Readiness(device)
        self._wrapped = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            **_no_buffer_exchange(),
            gradient_as_bucket_view=True,
            find_unused_parameters=self._unused == "zero",
            bucket_cap_mb=self._bucket_mib,
        )
        self._wrapped.register_comm_hook(None, _sum)
        for parameter in self._names:
            parameter.register_post_accumulate_grad_hook(self._ready.gradient)  # type: ignore[no-untyped-call]
        return self._wrapped

    def home(self, device: torch.device) -> torch.device:
        """Keep parameters where they are used."""
        return device

    def zero(self, optimizer: torch.optim.Optimizer) -> None:
        """Set gradients to zero where they lie, in the buckets: fresh ones would lie beside them in accumulation.

        A parameter that no rank uses must have none, or the optimizer would take a step for it.
        """
        optimizer.zero_grad(set_to_none=self._unused == "zero")

    def microbatch(self, last: bool, *, is_tried: bool = False) -> AbstractContextManager[object]:
        """Exchange in the last micro-batch only."""
        assert self._wrapped is not None
        self._exchanges = last
        return nullcontext() if last else self._wrapped.no_sync()

    def backward(self, loss: torch.Tensor) -> None:
        """Collective in the last micro-batch. Add the gradients of ``loss``."""
        self._ready.begin()
        loss.backward()  # type: ignore[no-untyped-call]
        self._ready.over()
        unused = [name for parameter, name in self._names.items() if parameter not in self._ready.used]
        if unused and self._exchanges and self._unused == "refuse":
            raise ModelError(
                f"{len(unused)} parameters took no part in a micro-batch on this rank: {', '.join(unused[:5])}",
                where="strategy.unused_parameters",
                hint="set strategy.unused_parameters=zero if that is meant, as with experts that get no token",
            )

    def exposed_seconds(self) -> float:
        """Return how long the last backward went on when this rank's last gradient was there."""
        return self._ready.seconds_after()

    def clip(self, max_norm: float | None) -> float:
        """Clip by the global norm; all ranks hold the same whole gradients, so no exchange is needed."""
        return clip_gradients(list(self._names), max_norm)

    def bind(self, optimizer: torch.optim.Optimizer, step_alone: StepAlone | None = None) -> None:
        """Share the optimizer's work and state out, if asked; its step is collective then."""
        assert step_alone is None, "check.py refuses optim.in_backward under ddp"
        if self._shares:
            share_out(optimizer, self._keeper, dist.get_rank())

    def keeps(self, parameter: torch.nn.Parameter) -> bool:
        """Keep all, or this rank's share."""
        return not self._shares or self._keeper[parameter] == dist.get_rank()

    def describe(self) -> dict[str, object]:
        """Say how gradients travel."""
        shared = {"optimizer": "shared out"} if self._shares else {}
        return {"name": self.name, "ranks": dist.get_world_size(), "bucket_mib": self._bucket_mib, **shared}


def _no_buffer_exchange() -> dict[str, Any]:
    """Rotary tables need no exchange in every forward; torch renamed the switch in 2.13."""
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False}


def _sum(_, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations, and not as text
    """Sum a bucket over ranks; DDP's own reduction would divide by the number of ranks."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
