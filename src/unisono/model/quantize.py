"""Keep frozen weights in 4 bits (NF4, Dettmers et al. 2023, "QLoRA"): blocks of 64 values, a scale in fp32 for each.

The linear layers of the blocks are replaced; embeddings, norms and the output head stay as they are. A product makes
the weights anew in the format of its input, for forward and again for backward: only the 4 bits are kept. Quantizing
and its inverse are bitsandbytes' own. What is trained beside them (adapters) is no worse for it; the base is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from unisono.bits import bitsandbytes

BLOCK = 64  # values that share a scale
KIND = "nf4"


class Nf4Linear(nn.Linear):
    """A linear layer whose frozen weight [out, in] is kept in 4 bits; ``weight`` holds them, two to a byte."""

    weight: nn.Parameter

    def __init__(self, linear: nn.Linear, weight: torch.Tensor) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        packed, state = bitsandbytes().functional.quantize_4bit(weight, blocksize=BLOCK, quant_type=KIND)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        self.register_buffer("scales", state.absmax)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Multiply, in the format of autocast or else of ``hidden`` [..., in]."""
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        product: torch.Tensor = _Product.apply(hidden.to(dtype), self)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias.to(dtype)

    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the rounded weight [out, in]."""
        shape = (self.out_features, self.in_features)
        weight: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit(
            self.weight, self.scales, BLOCK, KIND, shape, dtype
        )
        return weight


class _Product(torch.autograd.Function):
    """hidden x weight, with nothing kept for backward but the layer itself."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, layer: Nf4Linear) -> torch.Tensor:
        ctx.layer = layer
        return hidden @ layer.whole(hidden.dtype).T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad @ ctx.layer.whole(grad.dtype), None


def quantize(model: Any, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the linear layers of a causal language model, all but its output head, one after the other.

    ``read`` gives a weight's values, so that no more than one need be in memory whole.
    """
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child is not head:
                setattr(parent, name, Nf4Linear(child, read(child.weight)))


def num_parameters(model: nn.Module) -> int:
    """Count parameters as the model has them, whatever they are packed into; a tied one counts once."""
    layers = [layer for layer in model.modules() if isinstance(layer, Nf4Linear)]
    packed = {id(layer.weight): layer.in_features * layer.out_features for layer in layers}
    return sum(packed.get(id(parameter), parameter.numel()) for parameter in model.parameters())
