"""Attention of a short document by three batched products, for CPUs in half precision.

torch's fused kernel for the CPU goes through tiles that leave the bf16 units idle: up to ``LONGEST`` tokens plain
products with the whole ``[tokens, tokens]`` matrix take a third of its time (``benchmarks/attention.py``). The
probabilities are kept for backward: 2 bytes x heads x tokens^2 in each layer.
"""

from __future__ import annotations

from typing import Any

import torch

LONGEST = 512  # tokens; above, it keeps too much for what it gains


class ShortAttention(torch.autograd.Function):
    """Causal attention over one document, gradient included.

    ``query``: ``[heads, tokens, head]``; ``key``, ``value``: ``[key heads, tokens, head]``, each shared by a group of
    ``heads / key heads`` neighbours. Scores, their gradients and the softmax are fp32, as in a fused
    kernel; the other products have the format of the inputs. With
    P = softmax(scale Q K^T) and O = P V: dV = P^T dO; dS = P * (dO V^T - rowsum(dO * O)); dQ = scale dS K;
    dK = scale dS^T Q.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Return ``[heads, tokens, head]``."""
        heads, tokens, width = query.shape
        scale = width**-0.5 if scale is None else scale
        q = query.reshape(key.shape[0], -1, width)  # a group's queries, one below the other
        scores = _product_fp32(q, key.transpose(1, 2)).view(heads, tokens, tokens)
        future = torch.full((tokens, tokens), -torch.inf, device=query.device).triu_(1)
        weights = torch.softmax(scores.mul_(scale).add_(future), -1).to(query.dtype).view(len(key), -1, tokens)
        output = torch.bmm(weights, value)
        ctx.save_for_backward(q, key, value, weights, output)
        ctx.scale = scale
        return output.view(query.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of query, key and value."""
        query, key, value, weights, output = ctx.saved_tensors
        shape = grad.shape
        grad = grad.reshape(output.shape)
        grad_value = torch.bmm(weights.transpose(1, 2), grad)
        total = (grad.float() * output).sum(-1, keepdim=True)
        scores = _product_fp32(grad, value.transpose(1, 2))
        scores = scores.sub_(total).mul_(weights).mul_(ctx.scale).to(query.dtype)
        grad_key = torch.bmm(scores.transpose(1, 2), query)
        return torch.bmm(scores, key).view(shape), grad_key, grad_value, None


def _product_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a b`` in fp32: ``bmm`` would round it to the format of its inputs, and scores of 20 by 0.06.

    The inputs are exact in bf16, so that torch may multiply them as such: half the time.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast(a.device.type, enabled=False):
            return torch.bmm(a.float(), b.float())
    finally:
        torch.set_float32_matmul_precision(before)
