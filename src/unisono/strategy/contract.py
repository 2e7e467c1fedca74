"""What a strategy is: how ranks share the work of an update. See the design, "The strategy contract"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor

StepAlone = Callable[[torch.nn.Parameter], None]  # takes the optimizer's step of one parameter, from its gradient


class Strategy(Protocol):
    """After ``backward`` of the last micro-batch, ``p.grad`` is this rank's part of the SUM over ranks."""

    name: str
    forward_is_collective: bool

    def shard(self, model: torch.nn.Module) -> torch.nn.Module:
        """Collective. Wrap the training model; parameters may become sharded."""

    def home(self, device: torch.device) -> torch.device:
        """Return where parameters lie between their uses, on a rank that computes on ``device``."""

    def zero(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget the gradients of the update before."""

    def microbatch(self, last: bool, *, is_tried: bool = False) -> AbstractContextManager[object]:
        """Gate the gradient exchange: it happens in the last micro-batch of an update only.

        ``is_tried``: what this micro-batch gives will be forgotten; nothing steps.
        """

    def backward(self, loss: torch.Tensor) -> None:
        """Collective in the last micro-batch. Add the gradients of ``loss``."""

    def exposed_seconds(self) -> float:
        """Return how much of the last backward was exchange and waiting for others, with no work of this rank beside.

        To be asked when the loss of that micro-batch has been read. 0 where it is not told apart.
        """

    def clip(self, max_norm: float | None) -> float:
        """Collective. Return the global gradient norm; scale the gradients down to ``max_norm`` if it is larger."""

    def bind(self, optimizer: torch.optim.Optimizer, step_alone: StepAlone | None = None) -> None:
        """Take the optimizer in hand, once, before its first step.

        With ``step_alone`` each parameter is stepped as soon as its gradient is whole, and has none after ``backward``.
        """

    def keeps(self, parameter: torch.nn.Parameter) -> bool:
        """Tell whether this rank has the optimizer's state of a parameter, or of its part of one. After ``shard``."""

    def describe(self) -> dict[str, object]:
        """Say what it does, for log and report."""


def clip_gradients(parameters: list[torch.nn.Parameter], max_norm: float | None) -> float:
    """Clip by the global norm of whole gradients; returns the norm before clipping."""
    norm = square_sum([norm_of(p) for p in parameters if p.grad is not None]).sqrt().float()
    if max_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return float(norm)


def norm_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the norm of a parameter's gradient, or of this rank's part of it, in fp32 whatever it is kept in.

    Not in its own format, as torch's ``get_total_norm`` does: in bf16 it has 8 bits, and other ones on other ranks.
    """
    gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float32)
    return norm


def square_sum(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the squares of norms, in fp64."""
    return torch.stack(list(norms)).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)
