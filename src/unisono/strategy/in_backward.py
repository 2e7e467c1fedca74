"""Step within backward: a parameter moves as soon as its gradient is whole, which is let go at once.

No gradients are kept, so nothing may need all of them at a time: what does is refused by ``config/check.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unisono.strategy.contract import StepAlone, norm_of, square_sum


class StepsInBackward:
    """Hooks on parameters, open in the last micro-batch of an update: gradients add up in those before it."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], step_alone: StepAlone) -> None:
        self._parameters, self._step_alone = parameters, step_alone
        self._is_last = self._is_tried = False
        self._norms: list[torch.Tensor] = []
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    def begin(self, last: bool, is_tried: bool) -> None:
        """Say what the micro-batch that begins is."""
        self._is_last, self._is_tried = last, is_tried

    def _take(self, parameter: torch.nn.Parameter) -> None:
        if not self._is_last:
            return
        if not self._is_tried:
            self._norms.append(norm_of(parameter))
            self._step_alone(parameter)
        parameter.grad = None

    def square_sum(self) -> torch.Tensor:
        """Return the sum of the squares of all gradients of the update that is over, or of this rank's parts of them.

        A parameter that took no part in the last micro-batch still has the gradient of those before.
        """
        norms = self._norms + [norm_of(each) for each in self._parameters if each.grad is not None]
        self._norms = []
        return square_sum(norms)
