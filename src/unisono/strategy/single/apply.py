"""One process: no exchange, no process group."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from unisono.strategy.contract import StepAlone, clip_gradients
from unisono.strategy.in_backward import StepsInBackward


class Single:
    """The plain strategy; what all others must equal."""

    name = "single"
    forward_is_collective = False

    def __init__(self) -> None:
        self._trainable: list[torch.nn.Parameter] = []
        self._in_backward: StepsInBackward | None = None

    def shard(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model as it is."""
        self._trainable = [p for p in model.parameters() if p.requires_grad]
        return model

    def home(self, device: torch.device) -> torch.device:
        """Keep parameters where they are used."""
        return device

    def zero(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the gradients' memory back."""
        optimizer.zero_grad(set_to_none=True)

    def microbatch(self, last: bool, *, is_tried: bool = False) -> AbstractContextManager[object]:
        """Gate the steps within backward, if there are any."""
        if self._in_backward is not None:
            self._in_backward.begin(last, is_tried)
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of ``loss``."""
        loss.backward()  # type: ignore[no-untyped-call]

    def exposed_seconds(self) -> float:
        """Nothing is exchanged."""
        return 0.0

    def clip(self, max_norm: float | None) -> float:
        """Clip by the global norm and return it."""
        if self._in_backward is not None:
            return float(self._in_backward.square_sum().sqrt())
        return clip_gradients(self._trainable, max_norm)

    def bind(self, optimizer: torch.optim.Optimizer, step_alone: StepAlone | None = None) -> None:
        """Leave it as it is, or let it step within backward."""
        if step_alone is not None:
            self._in_backward = StepsInBackward(self._trainable, step_alone)

    def keeps(self, parameter: torch.nn.Parameter) -> bool:
        """Keep all."""
        return True

    def describe(self) -> dict[str, object]:
        """Say that there is one rank."""
        return {"name": self.name, "ranks": 1}
