"""Seconds of an update: products, exchange, optimizer. Bounds from data sheets, with assumptions that are named here.

Nothing of this has been measured on a GPU by us: ``benchmarks/gpu_check.sh`` is the place for it. Use it to compare
choices rather than to set an alarm clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from unisono.plan.hardware import Device
from unisono.plan.memory import Load, base_bytes

# Of the dense peak, what training of language models reaches in its products: published figures are 0.38 (Llama 3 on
# 16,384 H100, Dubey et al. 2024, table 4) to 0.55 (GPUs of one machine).
PRODUCTS = 0.45
HIDDEN = 0.7  # of the last backward, behind which an exchange can hide
BANDWIDTH = 0.8  # of a memory's, which element-wise work reaches


@dataclass(frozen=True)
class Seconds:
    """An update's seconds by cause, and what was computed in them."""

    products: float
    exchange: float  # beyond what is hidden behind backward
    optimizer: float
    flops: float  # of the model, on one rank; what checkpointing computes again is not counted
    tokens: int  # of all ranks
    attention: float = 0.0  # where it was measured by itself; else it is among the products
    elementwise: float = 0.0  # likewise
    overhead: float = 0.0  # likewise: Python, dispatch, hooks

    @property
    def by_cause(self) -> dict[str, float]:
        """Return the parts."""
        return {
            "products": self.products,
            "attention": self.attention,
            "element-wise": self.elementwise,
            "overhead": self.overhead,
            "exchange": self.exchange,
            "optimizer": self.optimizer,
        }

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self.by_cause.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks together in a second."""
        return self.tokens / self.total

    def mfu(self, device: Device) -> float:
        """Return the model's products a second as a share of the device's peak (Chowdhery et al. 2022)."""
        return self.flops / self.total / (device.half_tflops * 1e12)


def forward_flops(load: Load) -> float:
    """Return the products of one micro-batch's forward: 2 a weight and token, and causal attention.

    Attention: queries x keys and weights x values are 2 a multiply-add each, over half of length^2.
    """
    shape, n = load.architecture, load.tokens
    experts = shape.mlp_weights * shape.experts_per_token / shape.experts
    weights = shape.layers * (shape.attention_weights + experts)
    squares = sum(length**2 for length in load.documents)
    return 2.0 * weights * n + 2.0 * shape.embedding * load.targets + 2.0 * shape.layers * shape.attention * squares


def micro_batch_flops(load: Load) -> float:
    """Return forward and backward: a gradient for the input, and one for the weight where it is trained."""
    return forward_flops(load) * (3.0 if load.lora_rank is None else 2.0)


def seconds_of_update(load: Load, device: Device, *, num_micro: int) -> Seconds:
    """Predict an update of ``num_micro`` micro-batches a rank."""
    peak = (device.half_tflops if load.is_half else device.fp32_tflops) * 1e12
    again = forward_flops(load) if load.checkpointing else 0.0
    one = (micro_batch_flops(load) + again) / (peak * PRODUCTS)
    backward = one * 2 / 3
    shared = load.ranks if load.share_optimizer else load.parts
    touched = (2 * load.moments_bytes + 3 * load.trained_bytes) / shared  # read and write, and the gradient once
    exchange = _exchange_seconds(load, device, num_micro)
    return Seconds(
        products=one * num_micro,
        exchange=max(0.0, exchange - HIDDEN * (num_micro * one if load.is_sharded else backward)),
        optimizer=touched / (device.memory_gb_per_second * 1e9 * BANDWIDTH),
        flops=micro_batch_flops(load) * num_micro,
        tokens=load.tokens * num_micro * load.ranks,
    )


def _exchange_seconds(load: Load, device: Device, num_micro: int) -> float:
    """Bytes over the link: a ring's all-reduce sends 2 (N - 1) / N of the gradients, a gather or a scatter half of it.

    fsdp2 gathers the weights for forward and for backward of each micro-batch and scatters the gradients once; an
    optimizer that is shared out sends the weights once more.
    """
    around = (load.ranks - 1) / load.ranks
    if load.is_sharded:
        num_exchanges = num_micro if load.exchanges_always else 1
        sent = around * (2 * num_micro * _gathered(load) + num_exchanges * load.trained_bytes)
    else:
        sent = around * (2 + load.share_optimizer) * load.trained_bytes
    return sent / (device.link_gb_per_second * 1e9)


def _gathered(load: Load) -> int:
    """Bytes of all weights as they are gathered: linear layers in the format of their products."""
    shape = load.architecture
    return base_bytes(load) - shape.layers * shape.matrices * (load.weight_bytes - load.computed_bytes)
