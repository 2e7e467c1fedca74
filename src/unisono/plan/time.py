"""Seconds of an update: products, element-wise work, exchange, optimizer: from data sheets, and assumptions named here.

Nothing of this has been measured on a GPU by us (``benchmarks/gpu_check.sh`` is the place for it), but compared with
what others have published (``benchmarks/published.py``). Use it to compare choices rather than to set an alarm clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from unisono.plan.exchange import BUCKET_MIB, Collective, exposed_seconds, program
from unisono.plan.hardware import Device
from unisono.plan.host import host_seconds
from unisono.plan.links import DEFAULT_NETWORK, NETWORKS, Cluster, words_seconds
from unisono.plan.memory import HALF, Load, kept_bytes

PRODUCTS = 0.7  # of the dense peak, which large products reach by themselves
# What a block keeps for backward is written and read in forward, read again in backward, and a gradient of its size is
# written and read there. Checkpointing does the forward's part twice.
FORWARD_PASSES, BACKWARD_PASSES = 2, 3
PLAYED = 3  # micro-batches of an update, one by one
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
    host: float = 0.0  # copies to and from host memory, and the optimizer's step there

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
            "host memory": self.host,
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


def seconds_of_update(
    load: Load,
    device: Device,
    *,
    num_micro: int,
    cluster: Cluster | None = None,
    fill: float = 1.0,
    bucket_mib: int = BUCKET_MIB,
) -> Seconds:
    """Predict an update of ``num_micro`` micro-batches a rank, which are full to ``fill`` on average.

    ``cluster``: the machines; one with all ranks, where nothing else is said.
    """
    peak = (device.half_tflops if load.is_half else device.fp32_tflops) * 1e12 * PRODUCTS
    again = forward_flops(load) if load.repeats_products else 0.0
    bandwidth = device.memory_gb_per_second * 1e9 * BANDWIDTH
    one = (micro_batch_flops(load) + again) / peak * fill
    other = _touched_bytes(load) / bandwidth * fill
    shared = load.ranks if load.share_optimizer else load.parts
    touched = (2 * load.moments_bytes + 3 * load.trained_bytes) / shared  # read and write, and the gradient once
    return Seconds(
        products=one * num_micro,
        exchange=_exposed(
            load,
            cluster or Cluster(device, load.ranks, 1, NETWORKS[DEFAULT_NETWORK]),
            num_micro,
            one + other,
            bucket_mib,
        ),
        optimizer=0.0 if load.offloads else touched / bandwidth,
        flops=micro_batch_flops(load) * fill * num_micro,
        tokens=round(load.tokens * fill * num_micro * load.ranks),
        elementwise=other * num_micro,
        host=host_seconds(load, num_micro),
    )


def _touched_bytes(load: Load) -> float:
    """Return what a micro-batch reads and writes besides its products; packed weights are made anew for each."""
    num_forwards = 1 + load.checkpointing
    passes = num_forwards * FORWARD_PASSES + BACKWARD_PASSES
    made = (num_forwards + 1) * 2 * HALF * load.architecture.layers * load.architecture.matrices
    return passes * kept_bytes(load) + (made if load.is_packed else 0)


def _exposed(load: Load, cluster: Cluster, num_micro: int, one: float, bucket_mib: int) -> float:
    """Play the exchange against work that takes ``one`` second a micro-batch."""
    shares = _shares(load)

    @cache
    def cost(collective: Collective) -> tuple[str, float]:
        if collective.purpose == "losses":
            return "between processes", words_seconds(load.ranks)
        team = cluster.team(collective.among, load.parts)
        wire = "network" if team.machines > 1 else "machine"
        return wire, cluster.seconds(collective.kind, collective.num_bytes, team)

    def play(num: int) -> float:
        return exposed_seconds(
            program(load, num_micro=num, bucket_mib=bucket_mib), lambda what: one * shares[what], cost
        )

    if num_micro <= PLAYED:
        return play(num_micro)
    several = play(PLAYED)  # between the first and the last, each is like the one before
    return several + (num_micro - PLAYED) * (several - play(PLAYED - 1))


def _shares(load: Load) -> dict[str, float]:
    """Return the shares of a micro-batch's products: of a block's forward and backward, and of the head's both.

    The head's gradients are made with its loss (loss.py).
    """
    shape = load.architecture
    head = 2.0 * shape.embedding * load.targets
    block = (forward_flops(load) - head) / shape.layers
    back = (2.0 if load.lora_rank is None else 1.0) + load.repeats_products
    total = (head + block * shape.layers) * (1.0 + back)
    return {"forward": block / total, "head": head * (1.0 + back) / total, "backward": block * back / total}
