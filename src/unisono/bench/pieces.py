"""The single operations that an update is made of, each as forward and backward on given sizes, ready to be timed.

They are the code's own where it has them (attention, the loss of a chunk of logits, clipping, fused AdamW), and what
transformers' Llama does in a block elsewhere. ``plan.measured`` says how often each of them runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

from unisono.config.schema import OptimSection
from unisono.loss import LogitTransform, cross_entropy
from unisono.model.attention import document_attention
from unisono.optim import build_optimizer
from unisono.strategy.contract import clip_gradients

Act = Callable[[], object]
WIDTH = 1024  # of the rows that element-wise work goes over
HEADS, DOCUMENTS = 8, 2  # of the attention that is timed


class Workbench:
    """Makes the operations on one device and for one format of products."""

    def __init__(self, device: torch.device, compute: torch.dtype) -> None:
        self._device = device
        self._compute = compute

    @property
    def elementwise(self) -> list[Callable[[int], dict[str, Act]]]:
        """The operations whose time is that of their number of values."""
        stream = [self.norm, self.frozen_norm, self.cast, self.residual, self.add, self.gate, self.rotary, self.adapter]
        return [*stream, self.entropy, self.accumulate, self.zero, self.optimizer]

    def product(self, tokens: int, inner: int, outer: int) -> dict[str, Act]:
        """A linear layer's three products."""
        x, weight, grad = self._new(tokens, inner), self._new(outer, inner), self._new(tokens, outer)
        return {
            "forward": lambda: F.linear(x, weight),
            "input": lambda: grad @ weight,
            "weight": lambda: grad.t() @ x,
        }

    def attention(self, tokens: int, head: int) -> dict[str, Act]:
        """Attention over ``DOCUMENTS`` documents of ``tokens`` each, from rotated queries on; ``HEADS`` heads."""
        q, k, v = (self._new(1, HEADS, DOCUMENTS * tokens, head, trained=True) for _ in range(3))

        def attend() -> torch.Tensor:
            output, _ = document_attention(_MODULE, q, k, v, None, document_lengths=(tokens,) * DOCUMENTS)
            return output.reshape(1, DOCUMENTS * tokens, -1).contiguous()

        return _both(attend, [q, k, v])

    def norm(self, values: int) -> dict[str, Act]:
        """A norm whose weight is trained."""
        return self._norm(values, trained=True)

    def frozen_norm(self, values: int) -> dict[str, Act]:
        """A norm whose weight is not."""
        return self._norm(values, trained=False)

    def _norm(self, values: int, *, trained: bool) -> dict[str, Act]:
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        norm = LlamaRMSNorm(WIDTH).to(self._device)
        norm.weight.requires_grad_(trained)
        x = self._rows(values)
        return _both(lambda: norm(x), [x, norm.weight] if trained else [x])

    def cast(self, values: int) -> dict[str, Act]:
        """From fp32 to the format of products; its gradient goes the other way."""
        x = self._rows(values)
        return _both(lambda: x.to(self._compute), [x])

    def residual(self, values: int) -> dict[str, Act]:
        """A block's part added to the stream: in backward two gradients meet there."""
        x, part = self._rows(values), self._rows(values, self._compute)
        grad = torch.randn_like(x)
        backward = _both(lambda: x + part, [x, part])["backward"]
        return {"forward": lambda: x + part, "backward": lambda: (backward(), grad + x)}

    def add(self, values: int) -> dict[str, Act]:
        """Two arrays of fp32 added into a third."""
        a, b = self._rows(values).detach(), self._rows(values).detach()
        return {"forward": lambda: a + b}

    def gate(self, values: int) -> dict[str, Act]:
        """The MLP's activation times its other half."""
        gate, up = self._rows(values, self._compute), self._rows(values, self._compute)
        return _both(lambda: F.silu(gate) * up, [gate, up])

    def rotary(self, values: int) -> dict[str, Act]:
        """Queries or keys turned by their places, and brought into the format of products."""
        from transformers.models.llama.modeling_llama import rotate_half

        head = WIDTH // HEADS
        tokens = max(1, values // WIDTH)
        x = self._new(1, tokens, HEADS, head, trained=True)
        cos, sin = (torch.randn(1, 1, tokens, head, device=self._device) for _ in range(2))

        def turn() -> torch.Tensor:
            q = x.transpose(1, 2)
            turned: torch.Tensor = (q * cos) + (rotate_half(q) * sin)  # type: ignore[no-untyped-call]
            return turned.to(self._compute)

        return _both(turn, [x])

    def adapter(self, values: int) -> dict[str, Act]:
        """An adapter's output, scaled and added to its layer's."""
        base, part = self._rows(values, self._compute), self._rows(values, self._compute)
        return _both(lambda: base + part * 2.0, [base, part])

    def entropy(self, values: int) -> dict[str, Act]:
        """The loss of a chunk of logits, with their gradient."""
        vocabulary = 8192
        raw = self._new(max(1, values // vocabulary), vocabulary)
        target = torch.zeros(len(raw), 1, dtype=torch.long, device=self._device)
        low = torch.empty_like(raw)
        copies = raw.float if self._compute != torch.float32 else raw.clone
        return {"forward": lambda: cross_entropy(copies(), target, LogitTransform(), low, None)}

    def accumulate(self, values: int) -> dict[str, Act]:
        """A gradient of fp32 added to what is there."""
        total, grad = self._rows(values).detach(), self._rows(values).detach()
        return {"forward": lambda: total.add_(grad)}

    def zero(self, values: int) -> dict[str, Act]:
        """Zeros over fp32 values."""
        total = self._rows(values).detach()
        return {"forward": lambda: total.zero_()}

    def optimizer(self, values: int) -> dict[str, Act]:
        """AdamW's step over fp32 parameters, and clipping before it."""
        parameter = torch.nn.Parameter(self._rows(values).detach())
        parameter.grad = torch.randn_like(parameter) * 1e-3
        optimizer = build_optimizer(OptimSection(), [("one", parameter)])
        return {"forward": optimizer.step, "clip": lambda: clip_gradients([parameter], 1.0)}

    def _rows(self, values: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        shape = (1, max(1, values // WIDTH), WIDTH)
        return torch.randn(shape, device=self._device).to(dtype).requires_grad_()

    def _new(self, *shape: int, trained: bool = False) -> torch.Tensor:
        return torch.randn(shape, device=self._device).to(self._compute).requires_grad_(trained)


_MODULE = torch.nn.Identity()  # attention asks a module for its name alone


def _both(forward: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor]) -> dict[str, Act]:
    """Return forward, and backward from it to ``inputs``."""
    output = forward()
    grad = torch.randn_like(output)
    return {
        "forward": forward,
        "backward": lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True),
    }
