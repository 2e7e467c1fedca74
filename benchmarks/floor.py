"""The least that an update can take: its matrix products alone, on the very micro-batches that a run has trained.

python benchmarks/floor.py RUN_FOLDER UPDATES      (one rank; ``quick.py`` starts as many as the run had)

The shapes are those of the real model: every linear layer of the decoder multiplies a micro-batch's tokens, the head
its targets; forward, and for backward the gradients of input and weight. Weights lie apart in memory as in the model,
inputs and outputs are used again. The format, the threads and the number of processes at once are the run's.

Attention's products are timed apart and are no part of the floor: a fused kernel need not multiply what the causal
mask hides, so what they take is no bound. Likewise apart: the exchange of the gradients' bytes, by as many processes.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.nn import functional as F

from quick_figures import ANSWER, Floor, event_lines
from unisono import dist
from unisono.build import Inputs, make_batches, make_order, prepare
from unisono.config.load import load
from unisono.config.schema import RunConfig
from unisono.data.collate import MicroBatch
from unisono.data.loader import OrderedUpdates
from unisono.model.load import resolve_model
from unisono.model.stream import hollow_model
from unisono.precision import DTYPES, choose
from unisono.strategy import choose as choose_strategy
from unisono.worker import leave

TURNS = 4  # the first of which warms up


@dataclass(frozen=True)
class Product:
    """A linear layer on ``rows`` rows: ``[rows, inner] x [inner, outer]`` forward, and two of that size backward."""

    rows: int
    inner: int
    outer: int

    @property
    def flops(self) -> int:
        """Of all three; 2 a multiply-add."""
        return 3 * 2 * self.rows * self.inner * self.outer


@dataclass(frozen=True)
class Shapes:
    """What of a model multiplies: its decoder's linear layers and its head as (inner, outer), and its attention."""

    linears: tuple[tuple[int, int], ...]
    head: tuple[int, int]
    layers: int
    heads: int
    key_heads: int
    width: int  # of a head
    gradient_bytes: int

    def products(self, tokens: int, targets: int) -> list[Product]:
        """Return the products of a micro-batch, in the order of forward."""
        return [*(Product(tokens, *each) for each in self.linears), Product(targets, *self.head)]


def shapes_of(model: Any) -> Shapes:
    """Read the shapes off a causal language model, which may be without memory. Every weight of it is trained in fp32.

    A layer that multiplies and is no ``nn.Linear`` would be missed: SystemExit names it.
    """
    decoder, config = model.get_decoder(), model.config.get_text_config()
    linears = [each for each in decoder.modules() if isinstance(each, torch.nn.Linear)]
    known = {id(each.weight) for each in linears} | {id(model.get_input_embeddings().weight)}
    missed = [name for name, each in decoder.named_parameters() if each.ndim > 1 and id(each) not in known]
    if missed:
        raise SystemExit(f"error: {', '.join(missed[:3])} are no weights of linear layers; the floor would lack them")
    head = model.get_output_embeddings()
    return Shapes(
        linears=tuple((each.in_features, each.out_features) for each in linears),
        head=(head.in_features, head.out_features),
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        key_heads=config.num_key_value_heads,
        width=config.head_dim,
        gradient_bytes=sum(4 * each.numel() for each in model.parameters()),
    )


class Multiplier:
    """Multiplies what a model's update multiplies, and nothing else."""

    def __init__(self, shapes: Shapes, most_rows: int, dtype: torch.dtype) -> None:
        self._shapes = shapes
        self._dtype = dtype
        layers = [*shapes.linears, shapes.head]
        self._weights = [self._numbers(outer, inner) for inner, outer in layers]
        self._rows = {width: self._numbers(most_rows, width) for width in set(chain(*layers))}

    def linears(self, tokens: int, targets: int) -> None:
        """Multiply a micro-batch's way through the linear layers: forward, then backward from the head down."""
        all_products = list(zip(self._shapes.products(tokens, targets), self._weights, strict=True))
        for product, weight in all_products:
            F.linear(self._rows[product.inner][: product.rows], weight)
        for product, weight in reversed(all_products):
            grad = self._rows[product.outer][: product.rows]
            grad @ weight
            grad.t() @ self._rows[product.inner][: product.rows]

    def attention(self, documents: Sequence[int]) -> None:
        """Multiply the six batched products of each document and layer: scores and output, and their gradients."""
        shapes, group = self._shapes, self._shapes.heads // self._shapes.key_heads
        for tokens in documents:
            query = self._numbers(shapes.key_heads, group * tokens, shapes.width)
            key = self._numbers(shapes.key_heads, tokens, shapes.width)
            scores = self._numbers(shapes.key_heads, group * tokens, tokens)
            for _ in range(shapes.layers):
                for _ in range(2):  # scores, and the gradient of the probabilities
                    torch.bmm(query, key.transpose(1, 2))
                for _ in range(2):  # output, and the gradient of the queries
                    torch.bmm(scores, key)
                for _ in range(2):  # the gradients of the keys and of the values
                    torch.bmm(scores.transpose(1, 2), query)

    def _numbers(self, *shape: int) -> torch.Tensor:
        """Return numbers that are no special case of the hardware: neither zeros nor denormal."""
        return torch.linspace(-1.0, 1.0, 4093).repeat(-(-torch.Size(shape).numel() // 4093))[
            : torch.Size(shape).numel()
        ].view(shape).to(self._dtype)  # fmt: skip


def micro_batches(config: RunConfig, inputs: Inputs, world: dist.World, update: int) -> list[MicroBatch]:
    """Return the micro-batches that this rank had in ``update``, by the run's own lines."""
    strategy = choose_strategy(config.strategy, world.size)
    batches = make_batches(config, inputs, inputs.data.store, world, strategy)
    return OrderedUpdates(make_order(config, inputs.data), batches)(update).micro_batches


def check_same(batches: Sequence[MicroBatch], folder: Path, rank: int, update: int) -> None:
    """Compare with what the run says of itself: as many micro-batches, and the largest as large."""
    line = event_lines(folder, rank)[update]
    ours = (len(batches), max(each.num_tokens for each in batches))
    theirs = (line["micro_batches"], line["micro_batch_tokens"])
    if ours != theirs:
        raise SystemExit(f"error: update {update} of rank {rank} had (micro-batches, tokens) {theirs}, not {ours}")


def measure(folder: Path, updates: Sequence[int]) -> Floor:
    """Collective. Time the updates of the run in ``folder``, whose run file lies beside it."""
    world = dist.find_world()
    dist.join(world, 120)
    config = load(folder.parent / "run.yaml").config
    inputs = prepare(config, progress=lambda _: None)
    dtype = DTYPES[choose(config.precision.compute, world.device)[0]]
    shapes = shapes_of(hollow_model(resolve_model(config.model.path), trust_remote_code=False, dtype=torch.float32))
    work = {update: micro_batches(config, inputs, world, update) for update in updates}
    for update, batches in work.items():
        check_same(batches, folder, world.rank, update)
    multiplier = Multiplier(shapes, max(each.num_tokens for each in chain(*work.values())), dtype)
    products, attention = {}, {}
    for update, batches in work.items():
        sizes = [(each.num_tokens, each.num_targets) for each in batches]
        documents = [length for each in batches for length in each.document_lengths]
        products[str(update)] = _seconds(lambda sizes=sizes: [multiplier.linears(*each) for each in sizes])
        attention[str(update)] = _seconds(lambda documents=documents: multiplier.attention(documents))
    return Floor(products, attention, _exchange(shapes.gradient_bytes, config.strategy.bucket_mib, world))


def _exchange(num_bytes: int, bucket_mib: int, world: dist.World) -> float:
    """Time an all-reduce of so many bytes, a bucket at a time as DDP does; nothing else happens meanwhile."""
    if world.size == 1:
        return 0.0
    buckets = torch.zeros(num_bytes // 4).split(bucket_mib * 2**20 // 4)
    return _seconds(lambda: [torch_dist.all_reduce(each) for each in buckets])


def _seconds(act: Callable[[], object]) -> float:
    """Collective. Return the slowest rank's seconds, the median of the turns; all ranks begin together."""
    found = []
    for _ in range(TURNS):
        dist.wait_for_all()
        begin = time.perf_counter()
        act()
        found.append(max(theirs[0] for theirs in dist.gather([time.perf_counter() - begin])))
    return statistics.median(found[1:])


if __name__ == "__main__":
    with torch.no_grad():
        found = measure(Path(sys.argv[1]), [int(each) for each in sys.argv[2].split(",")])
    if dist.find_world().is_first:
        print(ANSWER + json.dumps(asdict(found)), flush=True)
    dist.wait_for_all()
    leave(0)
