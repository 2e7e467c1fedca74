"""The same run on more and more machines: tokens a second, what share of it is waiting, and where it breaks, and why.

The global batch stays that of the run file (strong scaling), since it is what decides the result. Each number of
machines gets the best choice that fits, so micro-batches may shrink on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unisono.config.schema import RunConfig
from unisono.errors import LaunchError
from unisono.plan.architecture import Architecture
from unisono.plan.fit import Choice, choices, step_bytes
from unisono.plan.hardware import GIB, Device
from unisono.plan.links import Cluster, Network
from unisono.plan.memory import Load, peak
from unisono.plan.time import Seconds, seconds_of_update

ENOUGH = 0.8  # an efficiency below it is said to be a break
MOST_MACHINES = 4096


@dataclass(frozen=True)
class Row:
    """One number of machines."""

    cluster: Cluster
    choice: Choice
    size: int  # samples of the global batch
    efficiency: float  # tokens a second and GPU, against one machine's

    @property
    def seconds(self) -> Seconds:
        """Of an update; planned from a data sheet, so that they are known."""
        assert self.choice.seconds is not None
        return self.choice.seconds

    @property
    def samples(self) -> int:
        """Samples of the GPU that has most."""
        return -(-self.size // self.cluster.ranks)

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together; places that have no sample do not count."""
        load = self.choice.load
        return self.size * load.tokens / len(load.documents) / self.seconds.total

    @property
    def communication(self) -> float:
        """Share of an update in which a GPU waits for others' bytes."""
        return self.seconds.exchange / self.seconds.total

    @property
    def idle(self) -> float:
        """Share of the work's places that have no sample: the batch does not divide evenly, or is too small."""
        return 1 - self.size / (self.samples * self.cluster.ranks)


@dataclass(frozen=True)
class Curve:
    """A strategy over numbers of machines, compared with one, whether it fits there or not."""

    name: str
    base: Row
    rows: Sequence[Row]

    @property
    def break_row(self) -> Row | None:
        """The first row that is not efficient enough."""
        return next((row for row in self.rows if row.efficiency < ENOUGH), None)


def parse_nodes(text: str) -> list[int]:
    """Understand 16, or 1..128: the first and its doubles, up to the last. Raises LaunchError."""
    first, dots, last = text.partition("..")
    if not (first.isdecimal() and (last.isdecimal() if dots else True)):
        raise LaunchError(f"--nodes {text} is no number of machines", hint="for example 16, or 1..128")
    low, high = int(first), int(last or first)
    if not 1 <= low <= high <= MOST_MACHINES:
        raise LaunchError(f"--nodes {text}: from 1 to {MOST_MACHINES}, the smaller one first")
    numbers = [low]
    while numbers[-1] < high:
        numbers.append(min(2 * numbers[-1], high))
    return numbers


def curves(
    config: RunConfig, shape: Architecture, device: Device, gpus: int, network: Network, numbers: Sequence[int]
) -> list[Curve]:
    """Give a curve for each strategy that the run file leaves open; one machine is always looked at, to compare."""
    clusters = [Cluster(device, gpus, number, network) for number in sorted({1, *numbers})]
    open_choices = [choices(config, shape, device, cluster.ranks) for cluster in clusters]
    names = {each.load.strategy for each in open_choices[-1]}
    found = []
    for strategy, shard_ranks in _kinds(config, gpus, clusters[-1]):
        if strategy not in names:
            continue
        rows = []
        for cluster, candidates in zip(clusters, open_choices, strict=True):
            loads = [each.load for each in candidates if each.load.strategy in (strategy, "single")]
            cut = shard_ranks if shard_ranks is not None and shard_ranks < cluster.ranks else None
            tried = [_choose(config, replace(load, shard_ranks=cut), cluster) for load in loads]
            rows.append(Row(cluster, min(tried, key=_rank), _size(config, loads[0]), 1.0))
        name = strategy if shard_ranks is None else f"{strategy} strategy.shard_ranks={shard_ranks}"
        found.append(_compared(name, rows, numbers))
    return found


def _kinds(config: RunConfig, gpus: int, largest: Cluster) -> Iterator[tuple[str, int | None]]:
    """Name strategies, each with how many ranks share a copy; a copy a machine is shown beside one over all of them."""
    yield "single", None
    yield "ddp", None
    if config.strategy.shard_ranks is not None:
        yield "fsdp2", config.strategy.shard_ranks
        return
    yield "fsdp2", None
    if largest.machines > 1 and gpus > 1:
        yield "fsdp2", gpus


def _size(config: RunConfig, load: Load) -> int:
    """Return the samples of a global batch, all of full length."""
    return config.batch.global_size or max(1, (config.batch.global_tokens or 0) // load.documents[0])


def _choose(config: RunConfig, load: Load, cluster: Cluster) -> Choice:
    """Work out a load on a cluster. The GPU with most samples decides; its last micro-batch may be less than full."""
    samples = -(-_size(config, load) // cluster.ranks)
    num_micro = -(-samples // len(load.documents))
    load = replace(load, accumulates=num_micro > 1, step_bytes=step_bytes(config.optim, load))
    seconds = seconds_of_update(
        load,
        cluster.device,
        num_micro=num_micro,
        cluster=cluster,
        fill=samples / (num_micro * len(load.documents)),
        bucket_mib=config.strategy.bucket_mib,
    )
    return Choice(load, peak(load), seconds, num_micro, cluster.device.memory_bytes)


def _rank(choice: Choice) -> tuple[bool, float]:
    """Put what fits first, the fastest first; of the rest, the smallest."""
    assert choice.seconds is not None, "planned from a data sheet"
    return not choice.fits, choice.seconds.total if choice.fits else choice.peak.total


def _compared(name: str, rows: Sequence[Row], numbers: Sequence[int]) -> Curve:
    """Work out efficiencies, and leave one machine out where it was not asked for."""
    base = rows[0]
    each = base.tokens_per_second / base.cluster.ranks
    compared = [replace(row, efficiency=row.tokens_per_second / row.cluster.ranks / each) for row in rows]
    return Curve(name, base, [row for row in compared if row.cluster.machines in numbers])


def reason(row: Row, base: Row) -> str:
    """Say what costs most of a row's efficiency: bytes between ranks, samples that are missing, or the optimizer."""
    optimizer, before = (each.seconds.optimizer / each.seconds.total for each in (row, base))
    causes = {
        f"GPUs wait for communication in {row.communication:.0%} of an update": row.communication - base.communication,
        f"the optimizer's step, {optimizer:.0%} of an update, does not get shorter": optimizer - before,
        _too_few(row): row.idle - base.idle,
    }
    return max(causes, key=lambda cause: causes[cause])


def _too_few(row: Row) -> str:
    if row.size < row.cluster.ranks:
        return f"{row.size} samples are too few for {row.cluster.ranks} GPUs: {row.cluster.ranks - row.size} have none"
    return (
        f"{row.size} samples do not divide evenly among {row.cluster.ranks} GPUs: some have {row.samples}, some fewer"
    )


def as_lines(found: Sequence[Curve], config: RunConfig) -> Iterator[str]:
    """Tell the curves, and where each breaks."""
    first = found[0].rows[0]
    load, cluster, network = first.choice.load, first.cluster, first.cluster.network
    yield (
        f"{load.architecture.parameters:,} parameters, {load.trained:,} trained; machines of {cluster.gpus} x "
        f"{cluster.device.name}, {network.name} between them"
    )
    where = "for each GPU" if network.is_per_gpu else "for each machine"
    yield f"({network.gb_per_second:.3g} GB/s {where}: {network.source})"
    yield (
        f"the global batch stays {first.size:,} samples of {config.data.max_length} tokens; for one that grows with "
        "the machines, override batch.global_size"
    )
    for curve in found:
        yield ""
        yield from _table(curve)


def _table(curve: Curve) -> Iterator[str]:
    missing = "" if curve.base.choice.fits else ", where it does not fit"
    yield f"{curve.name} (efficiency against one machine{missing})"
    yield "machines   GPUs  samples/GPU    tokens/s  efficiency  waiting  GiB a rank"
    for row in curve.rows:
        choice = row.choice
        also = [each for each in choice.overrides if not each.startswith("strategy.name")]
        too_much = (choice.peak.total - choice.room_bytes) / GIB
        remark = " ".join(also) if choice.fits else f"does not fit: {too_much:.1f} GiB too much"
        yield (
            f"{row.cluster.machines:8}  {row.cluster.ranks:5}  {row.samples:11}  {row.tokens_per_second:10,.0f}  "
            f"{row.efficiency:10.0%}  {row.communication:7.0%}  {choice.peak.total / GIB:10.1f}  {remark}"
        )
    yield verdict(curve)


def verdict(curve: Curve) -> str:
    """Say in words where a curve breaks."""
    if not any(row.choice.fits for row in curve.rows):
        return "it fits on none of them"
    row = curve.break_row
    if row is None:
        return f"{ENOUGH:.0%} or more up to {_count(curve.rows[-1])}"
    return f"it breaks at {_count(row)} ({row.efficiency:.0%}, under {ENOUGH:.0%}): {reason(row, curve.base)}"


def _count(row: Row) -> str:
    return "1 machine" if row.cluster.machines == 1 else f"{row.cluster.machines} machines"


def as_object(found: Sequence[Curve]) -> dict[str, Any]:
    """Give the curves for JSON."""
    first = found[0].rows[0].cluster
    return {
        "device": vars(first.device),
        "network": vars(first.network),
        "gpus": first.gpus,
        "curves": [{"strategy": each.name, "verdict": verdict(each), "nodes": _rows(each)} for each in found],
    }


def _rows(curve: Curve) -> list[dict[str, Any]]:
    return [
        {
            "nodes": row.cluster.machines,
            "ranks": row.cluster.ranks,
            "samples_per_rank": row.samples,
            "tokens_per_second": row.tokens_per_second,
            "efficiency": row.efficiency,
            "exposed_share": row.communication,
            "mfu": row.seconds.mfu(row.cluster.device),
            "peak_bytes": row.choice.peak.total,
            "fits": row.choice.fits,
            "overrides": row.choice.overrides,
            "num_micro_batches": row.choice.num_micro,
        }
        for row in curve.rows
    ]
