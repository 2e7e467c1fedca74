"""Build the parts of a run, once: inputs, model, strategy, optimizer, and the order of all its updates."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unisono.config.schema import ModelSection, RunConfig
from unisono.data.loader import Batches, Cut, OrderedUpdates, UpdateBatch
from unisono.data.order import Order
from unisono.data.prepare import Prepared
from unisono.data.prepare import prepare as prepare_data
from unisono.data.spread import CostModel
from unisono.data.store import TokenStore
from unisono.data.stream import Stream, StreamedUpdates, StreamPlan
from unisono.dist import World, gather_texts
from unisono.errors import DataError
from unisono.loss import TrainingModel
from unisono.model.facts import Facts, read_facts, sample_tokens
from unisono.model.load import base_model, load_model, resolve_model
from unisono.model.quantize import num_parameters
from unisono.model.stream import fill, is_hollow
from unisono.optim import build_optimizer, peak_rate, steps_alone
from unisono.precision import DTYPES, Precision
from unisono.resume import fixed_settings, trainable
from unisono.state import derive_seed
from unisono.strategy import Strategy
from unisono.strategy import choose as choose_strategy

CPU_MICRO_TOKENS, GPU_MICRO_TOKENS = 2048, 8192
NUM_RANKS_NAMED = 8


@dataclass(frozen=True)
class Inputs:
    """What is ready before any process group exists: the model's folder, its facts, the prepared tokens."""

    folder: Path
    facts: Facts
    data: Prepared


def prepare(config: RunConfig, progress: Callable[[str], None] = print) -> Inputs:
    """Resolve the model and prepare the data; the launcher calls it first, then every rank finds it done."""
    folder = resolve_model(config.model.path)
    facts = read_facts(folder)
    max_length = sample_tokens(config.data.max_length, facts)
    data = prepare_data(
        config.data,
        folder,
        max_length=max_length,
        trust_remote_code=config.model.trust_remote_code,
        preload=config.launch.allocator == "auto",
        progress=progress,
    )
    return Inputs(folder, facts, data)


def make_order(config: RunConfig, data: Prepared) -> Order:
    """Lay out which samples make up which update; DataError for a stream, which comes as it comes."""
    store = data.store
    try:
        return Order(
            data.sizes,
            weights=data.weights,
            lengths=store.lengths.__getitem__,
            global_size=config.batch.global_size,
            global_tokens=config.batch.global_tokens,
            seed=config.run.seed,
            shuffle=config.data.shuffle,
        )
    except ValueError as error:  # weights so small that an epoch would be empty
        raise DataError(str(error), where="data.weights", hint="raise them: 1 is once an epoch") from error


@dataclass(frozen=True)
class Run:
    """The parts of a run, built once."""

    config: RunConfig
    inputs: Inputs
    world: World
    model: torch.nn.Module  # the training model as the strategy wrapped it
    saved: torch.nn.Module  # what is handed over at the end: a transformers or peft model
    named: list[tuple[str, torch.nn.Parameter]]
    strategy: Strategy
    optimizer: torch.optim.Optimizer
    precision: Precision
    order: Order | None  # None: the data is streamed
    total: int
    peak: float
    settled: tuple[str, ...] = ()  # overrides by which the planner's answer differs from the run file

    @property
    def kept(self) -> list[tuple[str, torch.nn.Parameter]]:
        """The parameters whose optimizer state is on this rank."""
        return [(name, parameter) for name, parameter in self.named if self.strategy.keeps(parameter)]

    @property
    def settings(self) -> dict[str, Any]:
        """What a resumed run must share with this one."""
        key = self.inputs.data.train.key
        return fixed_settings(self.config, data_key=key, total=self.total, compute=self.precision.compute)

    def updates_from(self, position: dict[str, Any] | None) -> Callable[[int], UpdateBatch]:
        """Return what builds this rank's part of an update; a stream goes on from ``position``."""
        data, train = self.config.data, self.inputs.data.train
        if not isinstance(train, StreamPlan):
            assert self.order is not None, "prepared data has an order"
            return OrderedUpdates(self.order, self.batches_of(train))
        assert self.config.batch.global_size is not None, "check.py refuses a stream without it"
        stream = Stream(train, seed=self.config.run.seed, shuffle=data.shuffle, window=data.shuffle_window)
        return StreamedUpdates(stream, self.batches_of, global_size=self.config.batch.global_size, position=position)

    def batches_of(self, store: TokenStore) -> Batches:
        """Say how a store's samples become this rank's micro-batches."""
        return make_batches(self.config, self.inputs, store, self.world, self.strategy)


def build(config: RunConfig, inputs: Inputs, world: World, compute: str, settled: tuple[str, ...] = ()) -> Run:
    """Collective. Load the model, wrap it, and lay out the order of the whole run."""
    check_same_data(inputs.data.train.key)
    strategy = choose_strategy(config.strategy, world.size, DTYPES[compute])
    saved, training, model = load_and_shard(
        config.model,
        inputs.folder,
        strategy,
        world,
        weights=DTYPES[config.precision.weights],
        seed=derive_seed(config.run.seed, "lora"),
    )
    named = trainable(training)
    precision = Precision(compute, world.device)
    # weights that are gathered in half precision multiply nothing else
    with precision.autocast() if strategy.forward_is_collective else nullcontext():
        training.verify(packed=config.data.pack, device=world.device)
    optimizer = build_optimizer(config.optim, named, seed=derive_seed(config.run.seed, "rounding"))
    strategy.bind(optimizer, steps_alone(optimizer) if config.optim.in_backward else None)
    order = None if isinstance(inputs.data.train, StreamPlan) else make_order(config, inputs.data)
    return Run(
        config=config,
        inputs=inputs,
        world=world,
        model=model,
        saved=saved,
        named=named,
        strategy=strategy,
        optimizer=optimizer,
        precision=precision,
        order=order,
        total=config.length.updates or (order.num_updates(config.length.epochs or 1) if order else 0),
        peak=peak_rate(config.optim, config.batch.global_size),
        settled=settled,
    )


def check_same_data(key: str) -> None:
    """Collective. DataError, on all ranks, when some have other data than rank 0: they would not share one update."""
    keys = gather_texts(key)
    others = [rank for rank, theirs in enumerate(keys) if theirs != keys[0]]
    if others:
        named = ", ".join(map(str, others[:NUM_RANKS_NAMED])) + (" ..." if len(others) > NUM_RANKS_NAMED else "")
        raise DataError(
            f"{len(others)} of {len(keys)} ranks have other data than rank 0: rank {named}",
            where="data.train",
            hint="every machine needs the same files, tokenizer and versions of the libraries",
        )


def load_and_shard(
    section: ModelSection, folder: Path, strategy: Strategy, world: World, *, weights: torch.dtype, seed: int
) -> tuple[torch.nn.Module, TrainingModel, torch.nn.Module]:
    """Collective. Load and wrap; returns the model to save, the training model, and that as the strategy wrapped it.

    A strategy that shards gets a model without memory, and its ranks read their rows afterwards. Sharding replaces
    parameters, so they are named only then; and the model is verified as it is, sharded, by all ranks together.
    """
    shards = strategy.forward_is_collective
    saved = load_model(section, folder, weights=weights, seed=seed, hollow=shards)
    if not shards:
        saved.to(world.device)
    elif not is_hollow(saved) and section.quantize == "none" and world.is_first:
        print(f"loading: the tensors in {folder} are not named as the model's: each rank reads all of them", flush=True)
    training = TrainingModel(base_model(saved), document_attention=section.attention in {"auto", "document"})
    model = strategy.shard(training).train()
    fill(training.causal_lm, folder, strategy.home(world.device))
    return saved, training, model


def make_batches(config: RunConfig, inputs: Inputs, store: TokenStore, world: World, strategy: Strategy) -> Batches:
    """Say how a store's samples become this rank's micro-batches."""
    facts = inputs.facts
    width = 12 * facts.hidden_size  # see CostModel
    cost = CostModel(quadratic=1 / width, target=facts.vocabulary / (width * facts.num_layers))
    cut = Cut(config.data.pack, micro_tokens(config, inputs, world), config.batch.micro_size)
    return Batches(
        store,
        cut,
        cost,
        rank=world.rank,
        world=world.size,
        equal_counts=strategy.forward_is_collective,
    )


def micro_tokens(config: RunConfig, inputs: Inputs, world: World) -> int:
    """Return the token budget of a micro-batch; auto is small on a CPU, where a larger one gains nothing.

    A longer sample has a micro-batch of its own.
    """
    if config.batch.micro_tokens != "auto":
        return config.batch.micro_tokens
    train = inputs.data.train
    longest = 1 if isinstance(train, StreamPlan) else train.longest
    return max(longest, GPU_MICRO_TOKENS if world.device.type == "cuda" else CPU_MICRO_TOKENS)


def announce(run: Run, compute: str, say: Callable[[str], None]) -> None:
    """Say in a few lines what is about to run: formats, strategy, and micro x accumulation x ranks = global."""
    config, world = run.config, run.world
    trained = sum(parameter.numel() for _, parameter in run.named)
    everything = num_parameters(run.saved)
    for line in run.inputs.data.messages:
        say(line)
    say(f"model: {trained:,} of {everything:,} parameters are trained; compute {compute}")
    say("strategy: " + ", ".join(f"{key} {value}" for key, value in run.strategy.describe().items()))
    if any(parameter.dtype == torch.bfloat16 for _, parameter in run.named):
        say("warning: weights are kept in bf16: updates smaller than 1/256 of a weight are lost (precision.weights)")
    say(f"threads: {torch.get_num_threads()} a rank; device {world.device}")
    say(describe_batch(run))
    if run.peak != config.optim.lr:
        say(f"learning rate: {config.optim.lr:g} scaled to {run.peak:g} ({config.optim.lr_scaling}, optim.lr_scaling)")
    say(f"length: {run.total} updates" + describe_epoch(run))


def describe_batch(run: Run) -> str:
    """Say micro x accumulation x ranks = global, in samples and tokens as far as they are known."""
    batch, ranks, train = run.config.batch, run.world.size, run.inputs.data.train
    micro = micro_tokens(run.config, run.inputs, run.world)
    if isinstance(train, StreamPlan) or run.order is None:
        size = f"batch.micro_size {batch.micro_size}" if batch.micro_size else f"micro up to {micro:,} tokens"
        return f"batch: {size}, ranks {ranks}, global {batch.global_size} samples"
    tokens = round(train.num_tokens / len(train) * samples_of_update(run.order))
    if batch.micro_size is not None and batch.global_size is not None:
        accumulation = batch.global_size // (batch.micro_size * ranks)
        return (
            f"batch: micro {batch.micro_size} x accumulation {accumulation} x ranks {ranks} = "
            f"global {batch.global_size} samples, about {tokens:,} tokens an update"
        )
    accumulation = max(1, -(-tokens // (micro * ranks)))
    return (
        f"batch: micro up to {micro:,} tokens x accumulation about {accumulation} x ranks {ranks} = "
        f"global {batch.global_size or round(samples_of_update(run.order))} samples, about {tokens:,} tokens an update"
    )


def describe_epoch(run: Run) -> str:
    """Say how long an epoch is, where that is known."""
    if run.order is None:
        return ", streamed"
    return f", {run.order.num_updates(1)} an epoch of {run.order.num_samples(1):,} samples"


def samples_of_update(order: Order) -> float:
    """Return the mean number of samples of the first epoch's updates."""
    return order.num_samples(1) / order.num_updates(1)
