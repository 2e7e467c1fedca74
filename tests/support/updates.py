"""Train a few updates of a tiny model from samples in memory, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from unisono.config.schema import LoraSection, ModelSection, OptimSection, StrategySection


@dataclass
class MemoryStore:
    """A token store of lists: ``samples`` are (prompt tokens, answer tokens) counts or explicit (ids, mask) pairs."""

    ids: list[np.ndarray]
    masks: list[np.ndarray]
    lengths: np.ndarray = field(init=False)
    num_targets: np.ndarray = field(init=False)
    record: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        for mask in self.masks:
            mask[0] = False
        self.lengths = np.array([len(i) for i in self.ids], np.int64)
        self.num_targets = np.array([int(m.sum()) for m in self.masks], np.int64)
        self.record = np.arange(len(self.ids), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.ids)

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.ids[index], self.masks[index]


def make_store(shapes: Sequence[tuple[int, int]], seed: int = 0) -> MemoryStore:
    """Random bytes: each shape is (prompt tokens, target tokens)."""
    generator = np.random.default_rng(seed)
    ids = [generator.integers(0, 256, prompt + answer).astype(np.int32) for prompt, answer in shapes]
    masks = [np.arange(prompt + answer) >= prompt for prompt, answer in shapes]
    return MemoryStore(ids, masks)


UNEVEN = [(3, 1), (3, 2), (3, 4), (3, 9), (0, 6), (12, 1), (2, 20), (7, 3)]


@dataclass
class Settings:
    """What a run of updates is made of; the defaults are SGD1 of the field cases."""

    shapes: Sequence[tuple[int, int]] = tuple(UNEVEN)
    updates: int = 1
    global_size: int = 8
    micro_tokens: int = 4096
    micro_size: int | None = None
    packed: bool = True
    attention: str = "auto"
    strategy: str = "auto"
    lora: dict[str, Any] | None = None
    checkpointing: Any = "none"
    quantize: Any = "none"
    unused: str = "refuse"
    share_optimizer: bool = False
    exchange: Any = "update"
    shard_ranks: int | None = None
    cpu_offload: bool = False
    reshards: bool = True
    prepare: Callable[[Any, Any], None] | None = None  # called with (training model, world) before it is wrapped
    optim: dict[str, Any] = field(
        default_factory=lambda: {"name": "sgd", "lr": 0.1, "schedule": "constant", "warmup": 0, "max_grad_norm": None}
    )
    compute: str = "fp32"
    seed: int = 0
    shuffle: bool = True


@dataclass
class Trace:
    """What a run of updates was: one entry an update, and the trained parameters at the end."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    ids: list[list[int]]
    parameters: dict[str, np.ndarray]
    stepped: list[bool] = field(default_factory=list)
    bad_ranks: list[list[int]] = field(default_factory=list)


def train_updates(rank: int, world: int, folder: Path, *runs: Settings) -> list[Trace]:
    """Train on this rank, one run after the other; the same lines that ``unisono.train`` runs, without files."""
    from unisono import dist

    place = dist.find_world()
    assert (place.rank, place.size) == (rank, world)
    dist.join(place, 30)
    traces = [train(place, folder, settings) for settings in runs]
    dist.leave()
    return traces


def train(place: Any, folder: Path, settings: Settings) -> Trace:
    """One run of updates; the caller has joined the group."""
    import torch

    from unisono.data.loader import Batches, Cut, Loader, OrderedUpdates
    from unisono.data.order import Order
    from unisono.data.spread import CostModel
    from unisono.loss import TrainingModel
    from unisono.model.load import base_model, load_model
    from unisono.model.stream import fill
    from unisono.optim import build_optimizer, rate, steps_alone
    from unisono.precision import DTYPES, Precision
    from unisono.resume import trainable
    from unisono.state import seed_update
    from unisono.step import take_update
    from unisono.strategy import choose

    rank, world = place.rank, place.size
    section = ModelSection(
        path=str(folder),
        attention=settings.attention,
        lora=None if settings.lora is None else LoraSection(**settings.lora),
        activation_checkpointing=settings.checkpointing,
        quantize=settings.quantize,
    )
    chosen = StrategySection(
        name=settings.strategy,
        unused_parameters=settings.unused,
        share_optimizer=settings.share_optimizer,
        exchange=settings.exchange,
        shard_ranks=settings.shard_ranks,
        cpu_offload=settings.cpu_offload,
        reshard_after_forward=settings.reshards,
    )
    strategy = choose(chosen, world, DTYPES[settings.compute])
    saved = load_model(section, folder, weights=torch.float32, seed=1, hollow=strategy.forward_is_collective)
    training = TrainingModel(base_model(saved), document_attention=settings.attention in {"auto", "document"})
    if settings.prepare is not None:
        settings.prepare(training, place)
    model = strategy.shard(training).train()
    fill(training.causal_lm, folder, strategy.home(place.device))
    named = trainable(training)
    optim = OptimSection(**settings.optim)
    optimizer = build_optimizer(optim, named)
    strategy.bind(optimizer, steps_alone(optimizer) if optim.in_backward else None)
    store = make_store(settings.shapes)
    order = Order(
        [len(store)],
        global_size=settings.global_size,
        global_tokens=None,
        seed=settings.seed,
        shuffle=settings.shuffle,
    )
    batches = Batches(
        store,
        Cut(settings.packed, settings.micro_tokens, settings.micro_size),
        CostModel(1 / 384, 1.0),
        rank=rank,
        world=world,
        equal_counts=strategy.forward_is_collective,
    )
    precision = Precision(settings.compute, place.device)
    losses, norms, rates, ids, stepped, bad_ranks = [], [], [], [], [], []
    for batch in Loader(OrderedUpdates(order, batches), first=1, last=settings.updates, prefetch=2):
        seed_update(settings.seed, batch.number, rank)
        lr = rate(optim, batch.number, settings.updates, optim.lr)
        result = take_update(
            model,
            batch.micro_batches,
            num_targets=batch.num_targets,
            strategy=strategy,
            optimizer=optimizer,
            precision=precision,
            world=place,
            rate=lr,
            max_grad_norm=optim.max_grad_norm,
        )
        losses.append(result.loss)
        norms.append(result.grad_norm)
        rates.append(optimizer.param_groups[0]["lr"])
        ids.append(batch.records)
        stepped.append(result.stepped)
        bad_ranks.append(result.bad_ranks)
    parameters = {name: _whole(parameter).numpy().copy() for name, parameter in named}
    return Trace(losses, norms, rates, ids, parameters, stepped, bad_ranks)


def _whole(parameter: Any) -> Any:
    """A parameter's full value, gathered if it is sharded."""
    from torch.distributed.tensor import DTensor

    data = parameter.detach()
    return data.full_tensor() if isinstance(data, DTensor) else data


def assert_same_step(ours: Trace, other: Trace, tolerance: float = 1e-6) -> None:
    """The field cases' "same step": largest absolute parameter difference <= 1e-6."""
    assert ours.parameters.keys() == other.parameters.keys()
    worst = max(float(np.abs(ours.parameters[k] - other.parameters[k]).max()) for k in ours.parameters)
    assert worst <= tolerance, f"parameters differ by {worst:.3g}"


def assert_same_trace(ours: Trace, other: Trace, tolerance: float = 1e-6) -> None:
    """The field cases' "same trace": every per-update loss within 1e-6."""
    worst = max(abs(a - b) for a, b in zip(ours.losses, other.losses, strict=True))
    assert worst <= tolerance, f"losses differ by {worst:.3g}: {ours.losses} {other.losses}"
