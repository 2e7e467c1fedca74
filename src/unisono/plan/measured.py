"""Seconds of an update on a machine that was calibrated: how often each operation runs, times what it takes there.

Nothing is fitted to whole updates: counts come from what the training code and transformers' Llama do, times from
``unisono plan --calibrate``, which times each operation by itself. Left out, since nobody has compared it: what experts
and other families' extra norms cost beyond the same operations on their sizes. ``benchmarks/time_truth.py`` compares
with real updates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from unisono.plan.architecture import architecture_of
from unisono.plan.host import host_seconds
from unisono.plan.machine import Rates
from unisono.plan.memory import CHUNK_BYTES, FP32, GROUP_BYTES, Load
from unisono.plan.time import Seconds, micro_batch_flops

BUCKET_BYTES = 25 * 2**20  # of ddp's exchanges, strategy.bucket_mib
# Models that compute next to nothing, whose updates show what no single operation does (bench.probe)
PROBE = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
PROBE_LAYERS, PROBE_DOCUMENTS, PROBE_RANK = (2, 6), (8, 8), 8


@dataclass(frozen=True)
class Clock:
    """Looks times up for the format that a load is computed in."""

    rates: Rates
    is_half: bool

    def __call__(self, piece: str, direction: str, *sizes: float) -> float:
        """Return the seconds of one run of a piece."""
        return self.rates.tables[f"{'bf16' if self.is_half else 'fp32'} {piece} {direction}"].at(*sizes)

    def both(self, piece: str, *sizes: float) -> float:
        """Return the seconds of forward and backward."""
        return self(piece, "forward", *sizes) + self(piece, "backward", *sizes)

    def cast(self, values: float, direction: str) -> float:
        """Return the seconds of a change of format, of which there is none in fp32."""
        return self("cast", direction, values) if self.is_half else 0.0


@dataclass(frozen=True)
class Pass:
    """Seconds of one way through all layers."""

    products: float
    attention: float
    elementwise: float

    def __add__(self, other: Pass) -> Pass:
        """Add cause by cause."""
        return Pass(
            self.products + other.products,
            self.attention + other.attention,
            self.elementwise + other.elementwise,
        )

    @property
    def total(self) -> float:
        """All of them."""
        return self.products + self.attention + self.elementwise


def seconds_measured(load: Load, rates: Rates, *, num_micro: int) -> Seconds:
    """Predict an update of ``num_micro`` micro-batches a rank from what was measured with as many ranks."""
    counted = _counted(load, rates, num_micro)
    return replace(counted, overhead=_overhead(load, rates) * num_micro)


def _counted(load: Load, rates: Rates, num_micro: int) -> Seconds:
    """Add up the operations."""
    clock = Clock(rates, load.is_half)
    again = _forward(load, clock, again=True) if load.repeats_products else Pass(0.0, 0.0, 0.0)
    one = _forward(load, clock) + _backward(load, clock) + again + _head(load, clock)
    accumulated = num_micro - (load.strategy == "single")  # the first gradient is taken over as it is
    return Seconds(
        products=one.products * num_micro,
        attention=one.attention * num_micro,
        elementwise=one.elementwise * num_micro + accumulated * clock("accumulate", "forward", load.trained),
        exchange=_exchange(load, rates, num_micro),
        optimizer=0.0 if load.offloads else _optimizer(load, clock),
        flops=micro_batch_flops(load) * num_micro,
        tokens=load.tokens * num_micro * load.ranks,
        host=host_seconds(load, num_micro),
    )


def _overhead(load: Load, rates: Rates) -> float:
    """Python, dispatch and hooks: what updates of tiny models take beyond their operations, by the number of layers.

    A block that is computed again goes through forward once more, taken for a third of it.
    """
    kind, half = ("full", "lora")[load.lora_rank is not None], ("fp32", "bf16")[load.is_half]
    beyond = []
    for layers, seconds in zip(PROBE_LAYERS, rates.tables[f"{half} update {kind}"].seconds, strict=True):
        shape = architecture_of({"model_type": "llama", **PROBE, "num_hidden_layers": layers}, where="probe")
        tiny = Load(
            shape,
            PROBE_DOCUMENTS,
            sum(PROBE_DOCUMENTS),
            is_half=load.is_half,
            lora_rank=None if load.lora_rank is None else PROBE_RANK,
            strategy="single" if load.ranks == 1 else "ddp",
            ranks=load.ranks,
        )
        beyond.append(seconds - _counted(tiny, rates, 1).total)
    each = max(0.0, (beyond[1] - beyond[0]) / (PROBE_LAYERS[1] - PROBE_LAYERS[0]))
    fixed = max(0.0, beyond[0] - PROBE_LAYERS[0] * each)
    return fixed + each * load.architecture.layers * (4 / 3 if load.checkpointing else 1)


def _linear(load: Load) -> list[tuple[str, int, int]]:
    """A block's linear layers as they are multiplied: (name, in, out); experts as one that is as wide as the chosen."""
    shape = load.architecture
    h, a, k, f = shape.hidden, shape.attention, shape.key_value, shape.intermediate * shape.experts_per_token
    if shape.family == "phi3":
        return [("qkv_proj", h, a + 2 * k), ("o_proj", a, h), ("gate_up_proj", h, 2 * f), ("down_proj", f, h)]
    return [
        ("q_proj", h, a),
        ("k_proj", h, k),
        ("v_proj", h, k),
        ("o_proj", a, h),
        ("gate_proj", h, f),
        ("up_proj", h, f),
        ("down_proj", f, h),
    ]


def _adapted(load: Load) -> dict[str, tuple[int, int]]:
    return {} if load.lora_rank is None else load.architecture.linear(load.lora_targets)


def _forward(load: Load, clock: Clock, *, again: bool = False) -> Pass:
    """Forward through the blocks; ``again``: in backward, where torch stops at the last thing it needs.

    Under autocast each product's input is cast for itself, and each fp32 weight once a micro-batch (a fresh pass casts
    frozen ones again).
    """
    shape, n, rank = load.architecture, load.tokens, load.lora_rank or 0
    adapted = _adapted(load)
    products = elementwise = 0.0
    for name, inner, outer in _linear(load):
        if not (again and name == "down_proj" and not adapted):
            products += clock("product", "forward", n, inner, outer)
        if not load.has_half_weights:
            elementwise += clock.cast(inner * outer, "forward")
        if _reads_fp32(name):
            elementwise += clock.cast(n * inner, "forward")
        if name in adapted:
            products += clock("product", "forward", n, inner, rank) + clock("product", "forward", n, rank, outer)
            elementwise += clock.cast(n * inner, "forward") * (1 if _reads_fp32(name) else 2)
            elementwise += clock("adapter", "forward", n * outer)
    norm = "norm" if load.lora_rank is None else "frozen_norm"
    elementwise += shape.norms * clock(norm, "forward", n * shape.hidden)
    elementwise += shape.qk_norm * clock(norm, "forward", n * (shape.attention + shape.key_value))
    elementwise += clock("rotary", "forward", n * shape.attention) + clock("rotary", "forward", n * shape.key_value)
    elementwise += clock("gate", "forward", n * shape.intermediate * shape.experts_per_token)
    elementwise += (2 - again) * clock("residual", "forward", n * shape.hidden)
    layers = shape.layers
    return Pass(layers * products, layers * _attention(load, clock, "forward"), layers * elementwise)


def _reads_fp32(name: str) -> bool:
    """Tell whether a layer's input comes from a norm, which gives fp32, rather than from a product."""
    return not name.startswith(("o_", "down_"))


def _attention(load: Load, clock: Clock, direction: str) -> float:
    shape = load.architecture
    return shape.heads * sum(clock("attention", direction, length, shape.head) for length in load.documents)


def _backward(load: Load, clock: Clock) -> Pass:
    """Backward through the blocks: gradients of inputs, and of weights that are trained.

    The readers of a norm's output give a gradient each, which are added up. The first block's queries, keys and values
    have no use for their input's where the embedding is frozen.
    """
    shape, n, rank = load.architecture, load.tokens, load.lora_rank or 0
    adapted, is_trained = _adapted(load), load.lora_rank is None
    products = elementwise = unused = 0.0
    for name, inner, outer in _linear(load):
        product = clock("product", "input", n, inner, outer)
        products += product
        unused += product if not is_trained and name.startswith(("q", "k_", "v_")) else 0.0
        if _reads_fp32(name):
            elementwise += clock.cast(n * inner, "backward")
        if is_trained:
            products += clock("product", "weight", n, inner, outer)
            elementwise += 0.0 if load.has_half_weights else clock.cast(inner * outer, "backward")
        if name in adapted:
            for a, b in ((inner, rank), (rank, outer)):
                products += clock("product", "input", n, a, b) + clock("product", "weight", n, a, b)
            elementwise += clock.cast(n * inner, "backward") * (1 if _reads_fp32(name) else 2)
            elementwise += clock("adapter", "backward", n * outer) + clock("add", "forward", n * inner)
    num_readers = sum(_reads_fp32(name) for name, _, _ in _linear(load))
    elementwise += max(0, num_readers - 2) * clock("add", "forward", n * shape.hidden)
    norm = "norm" if is_trained else "frozen_norm"
    elementwise += shape.norms * clock(norm, "backward", n * shape.hidden)
    elementwise += shape.qk_norm * clock(norm, "backward", n * (shape.attention + shape.key_value))
    elementwise += clock("rotary", "backward", n * shape.attention) + clock("rotary", "backward", n * shape.key_value)
    elementwise += clock("gate", "backward", n * shape.intermediate * shape.experts_per_token)
    elementwise += 2 * clock("residual", "backward", n * shape.hidden)
    layers = shape.layers
    attention = layers * _attention(load, clock, "backward")
    return Pass(layers * products - unused, attention, layers * elementwise)


def _head(load: Load, clock: Clock) -> Pass:
    """The loss head (``loss.SummedCrossEntropy``), the last norm and the embedding, forward and backward.

    A chunk of logits at a time; their gradients are multiplied in groups, by the head and by the hidden states, whose
    product is added to the head's gradient.
    """
    shape, n, targets = load.architecture, load.tokens, load.targets
    vocabulary, h, is_trained = shape.vocabulary, shape.hidden, load.lora_rank is None
    chunk = min(targets, max(1, CHUNK_BYTES // (FP32 * vocabulary)))
    group = max(chunk, GROUP_BYTES // (load.computed_bytes * vocabulary) // chunk * chunk)
    num_groups = targets / min(group, targets)
    products = targets / chunk * clock("product", "forward", chunk, h, vocabulary)
    products += num_groups * clock("product", "input", min(group, targets), h, vocabulary)
    elementwise = targets / chunk * clock("entropy", "forward", chunk * vocabulary)
    elementwise += 0.0 if load.has_half_weights else clock.cast(vocabulary * h, "forward")
    elementwise += clock.both("norm" if is_trained else "frozen_norm", n * h)
    elementwise += 2 * clock("add", "forward", targets * h)  # states picked, their gradient scaled
    if is_trained:
        products += num_groups * clock("product", "weight", min(group, targets), h, vocabulary)
        # zeros for the head's gradient, scaled in the end; zeros for the embedding's, and its rows added
        elementwise += 2 * clock("zero", "forward", vocabulary * h) + clock("accumulate", "forward", vocabulary * h)
        elementwise += num_groups * clock("accumulate", "forward", vocabulary * h) if load.is_half else 0.0
        elementwise += clock("accumulate", "forward", vocabulary * h) * shape.is_tied + clock("add", "forward", n * h)
    return Pass(products, 0.0, elementwise)


def _optimizer(load: Load, clock: Clock) -> float:
    """Clipping, the step, and zeros for the next gradients where they stay in ddp's buckets."""
    shared = load.ranks if load.is_sharded or load.share_optimizer else 1
    step = clock("optimizer", "forward", load.trained) / shared
    zeros = clock("zero", "forward", load.trained) if load.strategy == "ddp" else 0.0
    return step + clock("optimizer", "clip", load.trained) / (load.ranks if load.is_sharded else 1) + zeros


def _exchange(load: Load, rates: Rates, num_micro: int) -> float:
    """All-reduces of ddp's buckets, and the gathering of losses.

    On a CPU nothing of it hides behind backward: the threads that exchange take the cores that compute. fsdp2 gathers
    and scatters half of what an all-reduce moves, block by block (assumed from the all-reduce, not measured).
    """
    if load.ranks == 1:
        return 0.0
    if not load.is_sharded:
        size = load.trained_bytes * (1.5 if load.share_optimizer else 1)
        return (size / BUCKET_BYTES + 3) * rates.alpha_seconds + size * rates.seconds_per_byte
    blocks, weights = load.architecture.layers + 1, load.architecture.parameters * load.computed_bytes
    scatters = num_micro if load.exchanges_always else 1
    moved = num_micro * weights + scatters * load.trained_bytes / 2
    return (2 * num_micro + scatters) * blocks * rates.alpha_seconds + moved * rates.seconds_per_byte
