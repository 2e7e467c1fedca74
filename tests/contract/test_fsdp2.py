"""Sharded training is the same training: updates, norms, adapters, uneven ranks, checkpoints, memory while loading."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.ranks import run_ranks
from support.runs import assert_same_weights, make_run, train_until_killed, train_whole, updates_of, weights_of
from support.tiny import save_tiny
from support.updates import Settings, Trace, assert_same_step, assert_same_trace, make_store, train_updates

LORA = {"rank": 4, "alpha": 8.0}
LORA_OVERRIDES = ("model.lora.rank=4", "model.lora.alpha=8.0")
SHARDED = Settings(strategy="fsdp2")
CLIPPED = {"name": "sgd", "lr": 0.1, "schedule": "constant", "warmup": 0, "max_grad_norm": 0.1}
ADAMW = {"name": "adamw", "lr": 1e-3, "schedule": "cosine", "warmup": 1, "max_grad_norm": 1.0}
VARIANTS = {
    "full": Settings(),
    "clipped": Settings(optim=CLIPPED),
    "adamw": Settings(optim=ADAMW, updates=4, global_size=3),
    "lora": Settings(lora=LORA, updates=3, global_size=3),
    "checkpointing": Settings(checkpointing="full"),
    "lora, checkpointing": Settings(lora=LORA, checkpointing="full", updates=2, global_size=4),
}


@cache
def reference(folder: Path) -> dict[str, Trace]:
    """All variants on one process, each update one padded batch, with transformers' own attention."""
    runs = [replace(settings, packed=False, attention="sdpa") for settings in VARIANTS.values()]
    return dict(zip(VARIANTS, run_ranks(train_updates, 1, folder, *runs)[0], strict=True))


@pytest.mark.parametrize(("world", "shard_ranks"), [(2, None), (3, None), (4, 4), (4, 2)])
def test_updates_equal_those_of_one_process(tiny: Path, world: int, shard_ranks: int | None) -> None:
    """Rows of 24 tokens: several micro-batches an update, not equally many on all ranks; odd worlds cut unevenly.

    With ``shard_ranks`` 2 of 4 there are two copies of the model, each in two parts (hybrid sharding).
    """
    cut = {"strategy": "fsdp2", "micro_tokens": 24, "shard_ranks": shard_ranks}
    runs = [replace(settings, **cut) for settings in VARIANTS.values()]
    for traces in run_ranks(train_updates, world, tiny, *runs):
        for variant, trace in zip(VARIANTS, traces, strict=True):
            expected = reference(tiny)[variant]
            assert_same_step(trace, expected)
            assert_same_trace(trace, expected)
            assert trace.norms == pytest.approx(expected.norms, rel=1e-5), variant
            assert trace.ids == expected.ids


def test_tied_embeddings(tiny_tied: Path) -> None:
    """The one matrix gets the gradient of the embedding and of the head."""
    expected = run_ranks(train_updates, 1, tiny_tied, Settings(packed=False, attention="sdpa"))[0][0]
    assert sum("lm_head" in name or "embed" in name for name in expected.parameters) == 1
    for world in (2, 3):
        for (trace,) in run_ranks(train_updates, world, tiny_tied, replace(SHARDED, micro_tokens=24)):
            assert_same_step(trace, expected)


def test_b14_norm_is_that_of_all_shards(tiny: Path) -> None:
    """The norm of one shard would be too small; a clipped SGD update has the length rate x threshold."""
    start = run_ranks(train_updates, 1, tiny, Settings(updates=0))[0][0]
    clipped = reference(tiny)["clipped"]
    assert clipped.norms[0] > 0.5
    traces = run_ranks(train_updates, 2, tiny, replace(SHARDED, optim=CLIPPED))
    for (trace,) in traces:
        assert trace.norms == pytest.approx(clipped.norms, rel=1e-5)
        assert trace.norms == traces[0][0].norms
        moved = [trace.parameters[name] - value for name, value in start.parameters.items()]
        length = float(np.sqrt(sum(float((m.astype(np.float64) ** 2).sum()) for m in moved)))
        assert length == pytest.approx(0.1 * 0.1, rel=1e-4)


def norm_of_bf16_gradients(_rank: int, _world: int, folder: Path, shard_ranks: int | None) -> tuple[float, float]:
    """Clip known gradients of bf16 weights; returns the norm and, in fp64, that of this very set of gradients."""
    import torch
    from torch.distributed.tensor import DTensor, distribute_tensor

    from unisono import dist
    from unisono.config.schema import ModelSection, StrategySection
    from unisono.loss import TrainingModel
    from unisono.model.load import base_model, load_model
    from unisono.strategy import choose

    place = dist.find_world()
    dist.join(place, 30)
    name = "single" if place.size == 1 else "fsdp2"
    strategy = choose(StrategySection(name=name, shard_ranks=shard_ranks), place.size, torch.bfloat16)  # type: ignore[arg-type]
    saved = load_model(ModelSection(path=str(folder)), folder, weights=torch.bfloat16, seed=1)
    training = strategy.shard(TrainingModel(base_model(saved), document_attention=False))
    torch.manual_seed(0)
    squares = 0.0
    for parameter in training.parameters():
        gradient = torch.randn(parameter.shape, dtype=torch.bfloat16)
        squares += float(gradient.double().square().sum())
        cut = isinstance(parameter, DTensor)
        parameter.grad = (
            distribute_tensor(gradient, parameter.device_mesh, parameter.placements) if cut else gradient  # type: ignore[attr-defined]
        )
    norm = strategy.clip(1.0)
    dist.leave()
    return norm, squares**0.5


def test_gradients_in_bf16_have_a_norm_in_fp32(tiny: Path) -> None:
    """In their own format it would have 8 bits, and other ones on another number of ranks."""
    for world, shard_ranks in ((1, None), (2, None), (4, 2)):
        for norm, true in run_ranks(norm_of_bf16_gradients, world, tiny, shard_ranks):
            assert norm == pytest.approx(true, rel=1e-6), f"{world} ranks"


def count_exchanges(rank: int, world: int, folder: Path, settings: Settings) -> int:
    """Train and count the reduce-scatters."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        num_exchanges = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.num_exchanges += "reduce_scatter" in str(func)
            return func(*args, **(kwargs or {}))

    with Counter() as counter:
        train_updates(rank, world, folder, settings)
    return counter.num_exchanges


def test_gradients_are_exchanged_once_an_update(tiny: Path) -> None:
    """For each of two blocks and for the rest, though there are five micro-batches."""
    assert run_ranks(count_exchanges, 2, tiny, replace(SHARDED, micro_size=1)) == [3, 3]
    always = replace(SHARDED, micro_size=1, exchange="micro_batch")
    assert run_ranks(count_exchanges, 2, tiny, always) == [15, 15], "five micro-batches on the longer rank"


def test_exchanging_after_each_micro_batch_is_the_same_update(tiny: Path) -> None:
    names = ("full", "adamw", "lora")
    runs = [replace(VARIANTS[n], strategy="fsdp2", exchange="micro_batch", micro_tokens=24) for n in names]
    for traces in run_ranks(train_updates, 2, tiny, *runs):
        for name, trace in zip(names, traces, strict=True):
            assert_same_step(trace, reference(tiny)[name])
            assert trace.norms == pytest.approx(reference(tiny)[name].norms, rel=1e-5)


def test_parts_in_host_memory_are_the_same_parts(tiny: Path) -> None:
    """The CPU is its own host here; what is new is that torch takes its way for offloaded parts."""
    for compute, shard_ranks, world in (("fp32", None, 2), ("bf16", None, 2), ("fp32", 2, 4)):
        cut = {"strategy": "fsdp2", "micro_tokens": 24, "compute": compute, "shard_ranks": shard_ranks}
        kept = [replace(VARIANTS[name], **cut) for name in ("clipped", "adamw", "lora")]
        runs = [*kept, *(replace(each, cpu_offload=True) for each in kept)]
        for traces in run_ranks(train_updates, world, tiny, *runs):
            for ours, theirs in zip(traces[len(kept) :], traces[: len(kept)], strict=True):
                assert ours.norms == theirs.norms
                assert_same_trace(ours, theirs, tolerance=0.0)
                assert_same_step(ours, theirs, tolerance=0.0)


def test_weights_that_are_kept_until_backward_are_the_same_weights(tiny: Path) -> None:
    kept = [replace(VARIANTS[name], strategy="fsdp2", micro_tokens=24) for name in ("adamw", "lora", "checkpointing")]
    kept.append(replace(kept[0], compute="bf16", exchange="micro_batch"))
    runs = [*kept, *(replace(each, reshards=False) for each in kept)]
    for traces in run_ranks(train_updates, 2, tiny, *runs):
        for ours, theirs in zip(traces[len(kept) :], traces[: len(kept)], strict=True):
            assert ours.norms == theirs.norms
            assert_same_trace(ours, theirs, tolerance=0.0)
            assert_same_step(ours, theirs, tolerance=0.0)


def train_with_own_seed(rank: int, world: int, folder: Path, *runs: Settings) -> list[Trace]:
    """Train on a rank whose generator is in a state of its own."""
    import torch

    torch.manual_seed(1000 + rank)
    return train_updates(rank, world, folder, *runs)


def test_b15_adapters_are_one(tiny: Path) -> None:
    """Adapters start alike on all ranks, whatever their generators, and learn from the data of all."""
    settings = Settings(lora=LORA, updates=3, global_size=3)
    begin, end = run_ranks(train_updates, 1, tiny, replace(settings, updates=0), settings)[0]
    assert any(np.abs(value).max() > 0 for name, value in begin.parameters.items() if "lora_A" in name)
    sharded = replace(settings, strategy="fsdp2")
    everyone = run_ranks(train_with_own_seed, 2, tiny, replace(sharded, updates=0), sharded)
    for traces, others in zip(everyone, reversed(everyone)):
        assert_same_step(traces[0], begin, tolerance=0.0)
        assert_same_step(traces[1], others[1], tolerance=0.0)
        assert_same_step(traces[1], end)
        assert_same_trace(traces[1], end)


def test_b15_a_parameter_that_is_not_sharded_is_refused() -> None:
    import torch

    from unisono.errors import ModelError
    from unisono.strategy.fsdp2.apply import refuse_whole

    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with pytest.raises(ModelError, match=r"2 trained parameters are not sharded: 0\.weight, 0\.bias"):
        refuse_whole(model)
    model.requires_grad_(False)
    refuse_whole(model)


def count_micro_batches(shapes: list[tuple[int, int]], world: int, cut: Any) -> list[int]:
    """Count the micro-batches that each rank has of its own in the first update."""
    from unisono.data.loader import Batches
    from unisono.data.spread import CostModel

    store = make_store(shapes)
    everyone = [Batches(store, cut, CostModel(1 / 384, 1.0), rank=rank, world=world) for rank in range(world)]
    return [len(batches.build(1, 0, np.arange(len(store))).micro_batches) for batches in everyone]


def test_b27_ranks_with_unequal_numbers_of_micro_batches(tiny: Path) -> None:
    """5 and 3, one sample each; then packed in rows of varying length; the forward of a sharded model is collective."""
    from unisono.data.loader import Cut

    long_and_short = [(4, 16)] * 3 + [(4, 3)] * 5
    uneven = [(2, 30)] + [(8, 1)] * 9
    assert sorted(count_micro_batches(long_and_short, 2, Cut(True, 4096, 1))) == [3, 5]
    assert sorted(count_micro_batches(uneven, 2, Cut(True, 30))) == [2, 3]
    runs = [
        Settings(shapes=long_and_short, global_size=8, micro_size=1, shuffle=False),
        Settings(shapes=uneven, global_size=10, micro_tokens=30, shuffle=False),
    ]
    expected = run_ranks(train_updates, 1, tiny, *runs)[0]
    everyone = run_ranks(train_updates, 2, tiny, *[replace(settings, strategy="fsdp2") for settings in runs])
    for settings, trace, *traces in zip(runs, expected, *everyone, strict=True):
        for ours in traces:
            assert ours.ids == [list(range(settings.global_size))]
            assert_same_step(ours, trace)
            assert_same_step(ours, traces[0], tolerance=0.0)


STAGES = [("single", 1, 2), ("fsdp2", 3, 4), ("ddp", 2, 6), ("fsdp2", 4, 8, "strategy.shard_ranks=2")]


def test_save_under_one_strategy_load_under_another(tiny_tied: Path, tmp_path: Path) -> None:
    """A run that is killed four times and goes on elsewhere each time is the run that nobody disturbed."""
    sections: dict[str, Any] = {
        "length": {"updates": 10},
        "validate": {"every": 2},
        "data": {"validation": 0.2},
        "batch": {"global_size": 3, "micro_tokens": 60},
    }
    plain = make_run(tmp_path, tiny_tied, name="plain", **sections)
    moved = make_run(tmp_path, tiny_tied, name="moved", **sections)
    train_whole(1, plain)
    for strategy, world, until, *overrides in STAGES:
        train_until_killed(world, moved, until + 1, f"strategy.name={strategy}", *overrides)
    assert "resumed update-00000008" in train_whole(1, moved)
    expected = {line["update"]: line for line in updates_of(tmp_path / "plain")}
    for line in updates_of(tmp_path / "moved"):
        assert line["loss"] == pytest.approx(expected[line["update"]]["loss"], abs=1e-5)
        assert line["grad_norm"] == pytest.approx(expected[line["update"]]["grad_norm"], rel=1e-4)
    assert_close_weights(tmp_path / "moved", tmp_path / "plain")


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_killed_run_resumes_bitwise_and_hands_over_the_whole_model(
    tiny_tied: Path, tmp_path: Path, lora: bool
) -> None:
    files = [make_run(tmp_path, tiny_tied, name=name, length={"updates": 4}) for name in ("single", "whole", "killed")]
    single, whole, killed = files
    overrides = LORA_OVERRIDES if lora else ()
    sharded = ("strategy.name=fsdp2", *overrides)
    train_whole(1, single, *overrides)
    train_whole(2, whole, *sharded)
    train_until_killed(2, killed, 3, *sharded)
    assert "resumed update-00000002" in train_whole(2, killed, *sharded)
    assert_same_weights(tmp_path / "killed", tmp_path / "whole")
    assert_close_weights(tmp_path / "whole", tmp_path / "single")


def assert_close_weights(ours: Path, other: Path) -> None:
    """Compare two final models, which have the same tensors under the same names."""
    mine, theirs = weights_of(ours), weights_of(other)
    assert mine.keys() == theirs.keys()
    worst = max(float(np.abs(mine[name] - theirs[name]).max()) for name in mine)
    assert worst < 1e-5, f"weights differ by {worst:.3g}"


def pss_bytes() -> int:
    """Return this process's proportional set size: shared pages count by the share."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Pss in smaps_rollup")


def load_and_measure(rank: int, world: int, warm: Path, folder: Path) -> int:
    """Load a model as a run does; returns by how much the proportional set size rose at most.

    It is read after every fourth block that is sharded and every 30th tensor that is read: reading it takes 20 ms.
    """
    import torch

    from unisono import dist
    from unisono.build import load_and_shard
    from unisono.config.schema import ModelSection, StrategySection
    from unisono.model import stream
    from unisono.strategy import choose
    from unisono.strategy.fsdp2 import apply

    place = dist.find_world()
    dist.join(place, 30)
    sizes: list[int] = []

    def measured(function: Callable[..., Any], every: int) -> Callable[..., Any]:
        calls = itertools.count(1)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            if next(calls) % every == 0:
                sizes.append(pss_bytes())
            return result

        return call

    def load(path: Path) -> Any:
        section, strategy = ModelSection(path=str(path)), choose(StrategySection(name="fsdp2"), world)
        return load_and_shard(section, path, strategy, place, weights=torch.float32, seed=1)

    load(warm)  # so that what a first load imports and unshares is not counted
    gc.collect()
    dist.wait_for_all()
    before = pss_bytes()
    apply.fully_shard, stream._read = measured(apply.fully_shard, 4), measured(stream._read, 30)
    model = load(folder)
    dist.wait_for_all()
    sizes.append(pss_bytes())
    dist.wait_for_all()
    del model
    dist.leave()
    return max(sizes) - before


def test_b49_host_memory_while_loading(tiny: Path, tmp_path: Path) -> None:
    """All ranks together need little more than the file: at no time does a rank hold the whole model."""
    big = save_tiny(tmp_path / "big", hidden_size=512, intermediate_size=1536, num_hidden_layers=16)
    file_bytes = (big / "model.safetensors").stat().st_size
    assert file_bytes > 200e6
    for world in (2, 4):
        peaks = run_ranks(load_and_measure, world, tiny, big)
        assert 0.9 * file_bytes < sum(peaks) <= 1.5 * file_bytes, peaks


BF16 = {
    "full": Settings(compute="bf16", optim=ADAMW, updates=4, global_size=3),
    "lora": Settings(compute="bf16", optim=ADAMW, updates=3, global_size=3, lora=LORA),
    "checkpointing": Settings(compute="bf16", optim=ADAMW, updates=3, global_size=3, checkpointing="full"),
}


@pytest.mark.parametrize("world", [2, 3])
def test_half_precision_is_that_of_replicas(tiny: Path, world: int) -> None:
    """Weights are gathered in bf16: the same copies that autocast makes. Sums over ranks differ in their order."""
    replicas = [replace(settings, micro_tokens=24) for settings in BF16.values()]
    sharded = [replace(settings, strategy="fsdp2") for settings in replicas]
    expected = run_ranks(train_updates, world, tiny, *replicas)[0]
    for traces in run_ranks(train_updates, world, tiny, *sharded):
        for ours, theirs in zip(traces, expected, strict=True):
            assert_same_trace(ours, theirs, tolerance=2e-6)
            assert ours.norms == pytest.approx(theirs.norms, rel=1e-5)
