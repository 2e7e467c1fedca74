"""Bytes on one rank, by what they are for and at which moment: derived from what the training code keeps.

``make plan-truth`` compares them with what real steps allocate (``benchmarks/plan_truth.py``). Symbols: h hidden size,
a width of all queries, k of all keys, f of the MLP, V vocabulary, n tokens of a micro-batch, t its targets, c bytes of
a computed value (2 or 4), s bytes of the residual stream (4, or 2 where weights are bf16).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.plan.architecture import Architecture

SHORT = 512  # tokens of a document whose attention keeps its probabilities on a CPU (model.products)
CHUNK_BYTES, GROUP_BYTES = 32 * 2**20, 128 * 2**20  # of the loss head (loss.py)
FEWEST_TERMS = 256  # of a product that selective checkpointing keeps (model/recompute.py)
SCALE_BYTES = 4 / 64  # of a value in NF4: a scale in fp32 for 64 of them
NF4_BYTES = 0.5 + SCALE_BYTES
FP32, HALF = 4, 2
# An assumption, not a measurement: context, libraries and their workspaces on a GPU, and what its allocator cannot use.
RESERVE = "reserve of the GPU"
CUDA_CONTEXT_BYTES, CUDA_FRAGMENTATION = 600 * 2**20, 0.04


@dataclass(frozen=True)
class Load:
    """What decides how much memory a rank takes. ``documents``: lengths of those in the fullest micro-batch."""

    architecture: Architecture
    documents: Sequence[int]
    targets: int
    is_half: bool = False  # computed in bf16 or fp16
    has_half_weights: bool = False
    lora_rank: int | None = None
    lora_targets: str | list[str] = "all-linear"
    has_dropout: bool = False  # on the adapters' inputs
    is_packed: bool = False  # frozen matrices in NF4
    recompute: str = "none"  # what backward computes again, as in model.activation_checkpointing
    moment_bytes: float = 8  # the optimizer's, for a trained value
    step_bytes: int = 0  # what the optimizer makes on the way, and forgets
    strategy: str = "single"
    ranks: int = 1
    share_optimizer: bool = False
    accumulates: bool = False  # more than one micro-batch an update
    exchanges_always: bool = False  # fsdp2: after each of them
    shard_ranks: int | None = None  # fsdp2: that share one copy of the model; None: all
    keeps_gathered: bool = False  # fsdp2: blocks' weights, between forward and backward
    cpu_offload: bool = False  # fsdp2: a rank's parts lie in host memory
    in_backward: bool = False  # gradients are let go as soon as they are whole
    on_gpu: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch."""
        return sum(self.documents)

    @property
    def checkpointing(self) -> bool:
        """Something is computed again, block by block."""
        return self.recompute != "none"

    @property
    def repeats_products(self) -> bool:
        """Whole blocks are computed again."""
        return self.recompute in ("full", "offload")

    @property
    def is_sharded(self) -> bool:
        """Every rank keeps its part of everything."""
        return self.strategy == "fsdp2"

    @property
    def offloads(self) -> bool:
        """Parts lie elsewhere than where they are used: on a CPU, host memory is the device's."""
        return self.is_sharded and self.cpu_offload and self.on_gpu

    @property
    def lets_go(self) -> bool:
        """No part of a gradient stays on the device."""
        return self.in_backward or self.offloads

    @property
    def parts(self) -> int:
        """Into how many parts weights, gradients and moments are cut."""
        return (self.shard_ranks or self.ranks) if self.is_sharded else 1

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight that is kept as it is."""
        return HALF if self.has_half_weights else FP32

    @property
    def computed_bytes(self) -> int:
        """Bytes of a value that a product gives."""
        return HALF if self.is_half else FP32

    @property
    def trained(self) -> int:
        """Values that are trained."""
        if self.lora_rank is None:
            return self.architecture.parameters
        return self.architecture.adapters(self.lora_rank, self.lora_targets)

    @property
    def trained_bytes(self) -> int:
        """Bytes of all trained values: adapters are fp32 whatever the base is."""
        return self.trained * (self.weight_bytes if self.lora_rank is None else FP32)

    @property
    def moments_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        return int(self.moment_bytes * self.trained)


@dataclass(frozen=True)
class Moment:
    """A moment of an update and what is in memory then, in bytes by purpose."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.parts.values())


def moments(load: Load) -> list[Moment]:
    """Return the moments that can be the peak of an update, in their order."""
    always = _always(load)
    work = {"optimizer's work": 0 if load.offloads else load.step_bytes}
    found = [
        Moment("end of forward", always | _forward(load)),
        *[Moment("backward", always | each) for each in _backward(load)],
        Moment("end of backward", always | _end_of_backward(load) | (work if load.in_backward else {})),
        Moment("optimizer", always | _gradients(load) | work),
    ]
    if not load.on_gpu:
        return found
    for moment in found:
        moment.parts[RESERVE] = CUDA_CONTEXT_BYTES + int(CUDA_FRAGMENTATION * moment.total)
    return found


def peak(load: Load) -> Moment:
    """Return the moment with the most bytes."""
    return max(moments(load), key=lambda moment: moment.total)


def host_bytes(load: Load) -> int:
    """Return what a save copies on this rank: weights that are trained and moments, each written by one rank.

    Besides, what waits on the host: blocks' inputs, or this rank's parts of weights, gradients and moments.
    """
    inputs = block_inputs(load) if load.recompute == "offload" else 0
    parts = base_bytes(load) + load.trained_bytes + load.moments_bytes if load.offloads else 0
    return -(-checkpoint_bytes(load) // load.ranks) + inputs + parts // load.parts


def block_inputs(load: Load) -> int:
    """Return the bytes of what a micro-batch gives to all blocks."""
    return load.tokens * load.architecture.layers * load.architecture.hidden * load.weight_bytes


def checkpoint_bytes(load: Load) -> int:
    """Return the size of a checkpoint on disk."""
    return load.trained_bytes + load.moments_bytes


def base_bytes(load: Load) -> int:
    """Return the bytes of all weights of one model: what is trained, and what is frozen."""
    shape = load.architecture
    matrices = shape.layers * shape.matrices
    rest = (shape.parameters - matrices) * load.weight_bytes
    adapters = 0 if load.lora_rank is None else load.trained_bytes
    return int(matrices * (NF4_BYTES if load.is_packed else load.weight_bytes)) + rest + adapters


def kept_bytes(load: Load) -> int:
    """Return what backward needs of all blocks, whether it is kept or, with checkpointing, made again."""
    return load.tokens * load.architecture.layers * _kept_by_layer(load, whole=True)


def _always(load: Load) -> dict[str, int]:
    shared = load.ranks if load.share_optimizer else load.parts
    scales = int(load.architecture.layers * load.architecture.matrices * SCALE_BYTES) if load.is_packed else 0
    if load.offloads:
        return {"weights": scales, "optimizer": 0}
    weights = (base_bytes(load) - scales) // load.parts + scales  # every rank keeps all scales
    return {"weights": weights, "optimizer": load.moments_bytes // shared}


def _gradients(load: Load) -> dict[str, int]:
    return {"gradients": 0 if load.lets_go else load.trained_bytes // load.parts}


def _forward(load: Load) -> dict[str, int]:
    """The loss head has just run: all that backward needs is there.

    Gradients are there already where ddp keeps them in its buckets, or where an earlier micro-batch left its own: those
    are whole under fsdp2, too, since it exchanges once. Where ddp's optimizer is shared out, those of the other ranks'
    parameters are made anew beside the buckets.
    """
    shape = load.architecture
    is_ddp = load.strategy == "ddp"
    beside = (load.ranks - 1) / load.ranks if is_ddp and load.share_optimizer and load.accumulates else 0
    num_gradients = (is_ddp or load.accumulates) + beside
    if load.is_sharded and load.accumulates and load.exchanges_always:
        num_gradients = 0 if load.offloads else 1 / load.parts
    num_gathered = shape.layers if load.keeps_gathered else 1
    gathered = (_root(load) + num_gathered * _gathered_block(load)) if load.is_sharded else 0
    copies = _copies_of_block(load, kept=True) * shape.layers
    kept = load.tokens * (shape.layers * _kept_by_layer(load) + _around_layers(load))
    return {
        "gradients": int(num_gradients * load.trained_bytes),
        "gathered weights": gathered,
        "weights in bf16": copies,
        "activations": kept + (_attention_matrices(load) if not load.checkpointing else 0),
        "loss head": _head(load),
    }


def _backward(load: Load) -> list[dict[str, int]]:
    """Under fsdp2, within the backward of the last block, of the second, and of the first.

    Weights of a block are gathered while those of the one after are used; these are given back before its gradients
    are copied for the exchange, which adds up what it gives: a part for each block so far. Whole gradients of earlier
    micro-batches lie there until then. gloo sums in a copy of its own.
    """
    if not load.is_sharded:
        return []
    shape, parts = load.architecture, load.parts
    block, is_trained = _gathered_block(load), load.lora_rank is None
    trained = shape.block * load.weight_bytes if is_trained else load.trained_bytes // shape.layers
    sent = shape.matrices * FP32 + (shape.block - shape.matrices) * load.weight_bytes if is_trained else trained
    is_whole, has_parts = load.accumulates and not load.exchanges_always, load.accumulates and load.exchanges_always
    kept_parts = 0 if load.lets_go else 1 / parts
    root = int(_root(load) * is_trained * (1 + is_whole + has_parts * kept_parts))
    matrices = _attention_matrices(load) // shape.layers
    kept = load.tokens * _kept_by_layer(load) + (0 if load.checkpointing else matrices)
    again = load.tokens * _kept_by_layer(load, whole=True) + matrices if load.checkpointing else 0
    found = []
    for done in (0, shape.layers - 1, shape.layers):
        before = shape.layers - done
        gradients = int(trained * (before * is_whole + (shape.layers if has_parts else done) * kept_parts))
        exchanged = sent * (1 if load.on_gpu else 2) if done else 0
        gathered = _root(load) + block * min(before, shape.layers if load.keeps_gathered else 1 if done else 2)
        activations = {"activations": before * kept + (again if before else 0)}
        found.append({"gradients": gradients + exchanged + root, "gathered weights": gathered} | activations)
    return found


def _end_of_backward(load: Load) -> dict[str, int]:
    """The embedding's gradient has just been made; beside its place in ddp's bucket, or what was accumulated before.

    fsdp2 holds the root's weights, their whole gradient and its copy for the exchange.
    """
    shape = load.architecture
    if load.is_sharded:
        whole, root = load.trained_bytes, _root(load)
        if load.lora_rank is not None:
            return {"gradients": 0 if load.lets_go else whole // load.parts, "gathered weights": root}
        is_whole = load.accumulates and not load.exchanges_always
        parts = 0 if load.lets_go else (whole - root) // load.parts
        exchange = whole + root if is_whole else parts + 2 * root
        return {"gradients": exchange, "gathered weights": root}
    is_trained = load.lora_rank is None
    own = shape.embedding * load.weight_bytes if is_trained else 0
    # of a tied matrix there are the head's gradient and the sum of both besides
    beside = own * ((load.strategy == "ddp" or load.accumulates) + 2 * shape.is_tied)
    # or the moment before: the first block's backward uses up what it kept, and the embedding has no gradient yet
    first = _first_block(load) - own if is_trained else 0
    gradients = own if load.lets_go else load.trained_bytes
    return {"gradients": gradients + beside, "activations": max(0, first - beside)}


def _first_block(load: Load) -> int:
    """The first block's activations and copies of its weights."""
    kept = load.tokens * _kept_by_layer(load, whole=True) + _attention_matrices(load) // load.architecture.layers
    return kept + _copies_of_block(load)


def _gathered_block(load: Load) -> int:
    """A block's weights, its linear layers in the format of their products, or as they are packed."""
    shape = load.architecture
    if load.is_packed:
        rest = (shape.block - shape.matrices) * load.weight_bytes + load.trained_bytes // shape.layers
        return int(shape.matrices * (NF4_BYTES - SCALE_BYTES)) + rest
    return shape.matrices * load.computed_bytes + (shape.block - shape.matrices) * load.weight_bytes


def _root(load: Load) -> int:
    """Embeddings, last norm and head, which fsdp2 gathers as one."""
    shape = load.architecture
    return (shape.parameters - shape.layers * shape.block) * load.weight_bytes


def _copies_of_block(load: Load, *, kept: bool = False) -> int:
    """Autocast makes a half-precision copy of each fp32 matrix that it multiplies with.

    What backward needs is ``kept`` until then; with checkpointing, what autocast has cached: trained matrices only.
    """
    if not load.is_half or (load.is_sharded and not load.is_packed):  # fsdp2 gathers them so instead
        return 0
    is_gone = load.has_half_weights or load.is_packed or (kept and load.checkpointing and load.lora_rank is not None)
    base = 0 if is_gone else load.architecture.matrices
    rank = load.lora_rank
    layers = load.architecture.layers
    adapters = 0 if rank is None else load.architecture.adapters(rank, load.lora_targets) // layers
    return HALF * (base + adapters)


def _kept_by_layer(load: Load, *, whole: bool = False) -> int:
    """Bytes per token that backward needs of a block; with checkpointing what that keeps, unless ``whole``.

    Norms: their input in fp32 and 1 / rms; and the normalized values where their weight is trained. Products: their
    input, which autocast copies for each of them (3 h, a, 2 h, f); with adapters, those of the adapted layers. MLP:
    gate, up, its activation (3 f), and their product where the layer after it is trained or adapted (f). Experts: what
    each is given and gives for a token, and what the router is given (h each). Adapters: rank values each.
    """
    shape, c = load.architecture, load.computed_bytes
    stream = load.weight_bytes
    if load.checkpointing and not whole:
        return (stream * shape.hidden if load.recompute != "offload" else 0) + _selected(load)
    if shape.kept is not None:
        return int(shape.kept.by_token)
    h, is_trained = shape.hidden, load.lora_rank is None
    is_gemma = shape.family.startswith("gemma")  # its norms multiply in fp32
    norms = shape.norms * (FP32 * h + FP32 + ((FP32 if is_gemma else stream) * h if is_trained else 0))
    normalized = (FP32 if is_gemma else c) if is_trained else 0
    heads = shape.qk_norm * (FP32 + normalized) * (shape.attention + shape.key_value)
    keeps_product = is_trained or shape.experts > 1 or "down_proj" in shape.linear(load.lora_targets)
    mlp = (3 + keeps_product) * c * shape.intermediate * shape.experts_per_token
    if shape.experts > 1:
        mlp += c * h * (2 * shape.experts_per_token + 1)
    return norms + heads + mlp + _inputs(load) + _attention(load)


def _selected(load: Load) -> int:
    """Bytes per token that selective checkpointing keeps besides: what products gave, and fused attention.

    Products of few terms (model.recompute), among them the adapters' second ones, are done again.
    """
    shape, c = load.architecture, load.computed_bytes
    if load.recompute != "selective":
        return 0
    outputs = sum(out for terms, out in shape.linear().values() if terms >= FEWEST_TERMS)
    if load.lora_rank is not None:
        adapted = shape.linear(load.lora_targets).values()
        outputs += sum(load.lora_rank for terms, _ in adapted if terms >= FEWEST_TERMS)
    is_fused = load.on_gpu or not load.is_half or max(load.documents) > SHORT
    return c * (outputs + is_fused * shape.attention) + is_fused * FP32 * shape.heads


def _inputs(load: Load) -> int:
    """Inputs of products that are kept: of those whose weight is trained, here or in an adapter.

    With dropout every adapter has an input of its own, and what was drawn for it: a bool on a GPU, fp32 on a CPU.
    """
    shape, c = load.architecture, load.computed_bytes
    has_dropout = load.has_dropout and load.lora_rank is not None
    copied = has_dropout or (load.is_half and (not load.has_half_weights or load.lora_rank is not None))
    targets = load.lora_targets if load.lora_rank is not None else "all-linear"
    linear = shape.linear(targets)
    outputs = 0 if load.lora_rank is None else c * load.lora_rank * len(linear)
    reads_hidden = [name for name in linear if name.startswith(("q", "k_", "v_"))]
    reads_mlp = [name for name in linear if name.startswith(("gate", "up_"))]
    num_hidden = (len(reads_hidden) + len(reads_mlp)) if copied else bool(reads_hidden) + bool(reads_mlp)
    kept = c * shape.hidden * num_hidden
    # else it is attention's own output; adapters take it in fp32, from which autocast makes a copy
    if "o_proj" in linear and (has_dropout or not load.on_gpu or (load.is_half and load.lora_rank is not None)):
        kept += c * shape.attention
    if has_dropout:
        kept += (1 if load.on_gpu else FP32) * sum(size for size, _ in linear.values())
    return kept + outputs


def _attention(load: Load) -> int:
    """Queries, keys, values and output (grouped keys are repeated by the fused kernel of a CPU), and log-sums."""
    shape, c = load.architecture, load.computed_bytes
    if load.on_gpu:
        return c * (2 * shape.attention + 2 * shape.key_value) + FP32 * shape.heads
    if load.is_half and max(load.documents) <= SHORT:
        return c * (2 * shape.attention + 2 * shape.key_value)
    return c * 4 * shape.attention + FP32 * shape.heads


def _attention_matrices(load: Load) -> int:
    """Probabilities of short documents in half precision on a CPU: heads x length^2, in every layer.

    A model that was traced may keep some anywhere, with an attention of its own.
    """
    if load.architecture.kept is not None:
        squares = sum(length**2 for length in load.documents)
        return int(load.architecture.layers * load.architecture.kept.by_pair * squares)
    if load.on_gpu or not load.is_half:
        return 0
    squares = sum(length**2 for length in load.documents if length <= SHORT)
    return load.architecture.layers * HALF * load.architecture.heads * squares


def _around_layers(load: Load) -> int:
    """Bytes per token outside the blocks: the last norm's input, values and output; rotary tables."""
    shape, stream = load.architecture, load.weight_bytes
    norm = FP32 * shape.hidden + FP32 + (stream * shape.hidden if load.lora_rank is None else 0)
    return norm + stream * shape.hidden + 2 * FP32 * shape.head


def _head(load: Load) -> int:
    """The loss head at its fullest: hidden states of the targets and their gradient, the weight's gradient, a chunk.

    It takes chunks of ``CHUNK_BYTES`` of fp32 logits, and gathers their gradients in groups before it multiplies.
    """
    shape, c, stream = load.architecture, load.computed_bytes, load.weight_bytes
    V, h, t = shape.vocabulary, shape.hidden, load.targets
    chunk = max(1, CHUNK_BYTES // (FP32 * V))
    group = max(chunk, GROUP_BYTES // (c * V) // chunk * chunk)
    is_trained = load.lora_rank is None
    always = 2 * stream * t * h + (FP32 * V * h if is_trained else 0)
    always += c * V * h if c != stream else 0  # its weight, cast
    always += c * min(group, t) * h if c != stream else 0
    gradients = c * min(group, t) * V
    logits = min(chunk, t) * V * (FP32 if c == FP32 else c + FP32)
    product = c * V * h if is_trained and c != FP32 else 0
    return always + gradients + max(logits, product)
