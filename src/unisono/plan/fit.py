"""Every choice that a run file leaves open, against a device: which fit, which is the fastest, what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from unisono.config.schema import OptimSection, RunConfig
from unisono.errors import ConfigError
from unisono.plan.architecture import Architecture
from unisono.plan.hardware import GIB, Device
from unisono.plan.machine import CALIBRATE
from unisono.plan.measured import seconds_measured
from unisono.plan.memory import FP32, HALF, Load, Moment, checkpoint_bytes, host_bytes, peak
from unisono.plan.time import Seconds, seconds_of_update

SIZES = (1, 2, 4, 8, 16, 32)  # samples of full length in a micro-batch
WAYS = ("none", "selective", "full")  # of activation checkpointing, tried where the run file has none
EVERY_WAY = (*WAYS, "offload")
SHOWN = 6
BLOCK = 256  # values of a row that share a scale, in moments of 8 bits (optim.lean)
PIECE = 2**22  # values that moments in bf16 are worked on at a time (optim.lean)


@dataclass(frozen=True)
class Choice:
    """A way to run it, with what a rank needs and how long an update takes."""

    load: Load
    peak: Moment
    seconds: Seconds | None  # None: nothing is known of the device's speed
    num_micro: int
    room_bytes: int

    @property
    def fits(self) -> bool:
        """Tell whether the peak is within the device's memory."""
        return self.peak.total <= self.room_bytes

    @property
    def overrides(self) -> list[str]:
        """Say the choice as overrides of the run file."""
        load = self.load
        return [
            f"strategy.name={load.strategy}",
            *(["strategy.share_optimizer=true"] if load.share_optimizer else []),
            *(["strategy.exchange=micro_batch"] if load.exchanges_always else []),
            *(["strategy.cpu_offload=true"] if load.cpu_offload else []),
            *(["strategy.reshard_after_forward=false"] if load.keeps_gathered else []),
            *([f"model.activation_checkpointing={load.recompute}"] if load.checkpointing else []),
            f"batch.micro_tokens={load.tokens}",
        ]


def choices(config: RunConfig, shape: Architecture, device: Device, ranks: int) -> list[Choice]:
    """Judge every open choice on ``ranks`` devices: those that fit first, the fastest first; of the rest, the smallest.

    Samples are taken to be of ``data.max_length`` tokens, all of them targets: the worst that can come.
    """
    length = config.data.max_length
    if length == "auto":
        raise ConfigError(
            "the planner needs the longest sample in tokens, and data.max_length is auto",
            where="data.max_length",
            hint="for example data.max_length=2048",
        )
    size = config.batch.global_size or max(1, (config.batch.global_tokens or 0) // length)
    found = []
    for load in _loads(config, shape, device, ranks, length):
        num_micro = max(1, round(size / (len(load.documents) * ranks)))
        load = replace(load, accumulates=num_micro > 1, step_bytes=step_bytes(config.optim, load))
        seconds = _seconds(load, device, num_micro, config.strategy.bucket_mib)
        found.append(Choice(load, peak(load), seconds, num_micro, device.memory_bytes))
    return sorted(found, key=_rank)


def _rank(choice: Choice) -> tuple[bool, float]:
    """Order: what fits first, the fastest ahead; by size where no speed is known, or nothing fits."""
    if not choice.fits or choice.seconds is None:
        return not choice.fits, choice.peak.total
    return False, -choice.seconds.tokens_per_second


def _seconds(load: Load, device: Device, num_micro: int, bucket_mib: int) -> Seconds | None:
    """Predict from what was measured, else from a data sheet."""
    if device.rates is not None:
        return seconds_measured(load, device.rates, num_micro=num_micro)
    if not device.half_tflops:
        return None
    return seconds_of_update(load, device, num_micro=num_micro, bucket_mib=bucket_mib)


def computes_in_half(config: RunConfig, device: Device) -> bool:
    """Tell whether products are of bf16 or fp16."""
    compute = config.precision.compute
    return compute in ("bf16", "fp16") or (compute == "auto" and device.has_bf16)


def _loads(config: RunConfig, shape: Architecture, device: Device, ranks: int, length: int) -> Iterator[Load]:
    model, optim, batch = config.model, config.optim, config.batch
    base = Load(
        shape,
        (length,),
        length,
        is_half=computes_in_half(config, device),
        has_half_weights=config.precision.weights == "bf16",
        lora_rank=None if model.lora is None else model.lora.rank,
        lora_targets="all-linear" if model.lora is None else model.lora.targets,
        has_dropout=model.lora is not None and model.lora.dropout > 0,
        is_packed=model.quantize != "none",
        ranks=ranks,
        in_backward=optim.in_backward,
        on_gpu=device.is_gpu,
    )
    base = replace(base, moment_bytes=moment_bytes(optim, base))
    if batch.micro_size is not None:
        sizes = [batch.micro_size]
    elif batch.micro_tokens != "auto":
        sizes = [max(1, batch.micro_tokens // length)]
    else:
        most = max(1, (batch.global_size or SIZES[-1]) // ranks)
        sizes = [size for size in SIZES if size <= most]
    for strategy in _strategies(config, device, ranks):
        for recompute in WAYS if model.activation_checkpointing == "none" else (model.activation_checkpointing,):
            for size in sizes:
                yield replace(
                    base,
                    documents=(length,) * size,
                    targets=length * size,
                    recompute=recompute,
                    **strategy,
                )


def moment_bytes(optim: OptimSection, load: Load) -> float:
    """Return the optimizer's bytes for a trained value, on average; see ``optim.moments``."""
    if optim.name == "adamw_bf16":
        return 2 * HALF
    if optim.name == "adamw8bit":
        in_blocks = sum(count for row, count in _rows(load) if row % BLOCK == 0) / load.trained
        return 2 * (in_blocks * (1 + FP32 / BLOCK) + (1 - in_blocks) * FP32)
    return (2 if optim.name == "adamw" else int(optim.momentum > 0)) * load.trained_bytes / load.trained


def step_bytes(optim: OptimSection, load: Load) -> int:
    """Return what the optimizer makes on the way: with moments in bf16 a piece in fp32, and what is drawn for it.

    Both moments, four numbers of 64 bits for each value, and a weight in bf16 with its gradient in fp32.
    """
    if optim.name != "adamw_bf16":
        return 0
    shape, half = load.architecture, load.has_half_weights and load.lora_rank is None
    largest = shape.embedding if load.lora_rank is None else max(count for _, count in _rows(load)) // shape.layers
    return min(PIECE, largest // load.parts) * (2 * FP32 + 4 * 8 + 2 * FP32 * half)


def _rows(load: Load) -> Iterator[tuple[int, int]]:
    """Give the length of a row of the trained matrices, and how many values have such rows."""
    shape, rank = load.architecture, load.lora_rank
    if rank is not None:
        for inputs, outputs in shape.linear(load.lora_targets).values():
            yield inputs, shape.layers * rank * inputs
            yield rank, shape.layers * rank * outputs
        return
    mlp = shape.layers * shape.hidden * shape.intermediate * shape.experts
    yield shape.hidden, shape.layers * shape.hidden * (shape.attention + 2 * shape.key_value) + 2 * mlp
    yield shape.hidden, shape.embedding * (1 if shape.is_tied else 2)
    yield shape.attention, shape.layers * shape.attention * shape.hidden
    yield shape.intermediate, mlp


def _strategies(config: RunConfig, device: Device, ranks: int) -> Iterator[dict[str, Any]]:
    """Give each strategy with what it leaves open, as fields of a load.

    An optimizer that is shared out; an exchange in each micro-batch, and either parts in host memory or weights that
    stay gathered until backward.
    """
    section = config.strategy
    if ranks == 1:
        yield {"strategy": "single"}
        return
    if section.name in ("auto", "ddp") and not config.optim.in_backward:
        for shared in (True,) if section.share_optimizer else (False, True):
            yield {"strategy": "ddp", "share_optimizer": shared}
    if section.name in ("auto", "fsdp2"):
        shard_ranks = section.shard_ranks if section.shard_ranks != ranks else None
        can_offload = device.is_gpu and config.precision.compute != "fp16" and not config.optim.in_backward
        ways = [(section.cpu_offload, not section.reshard_after_forward)]
        if not any(ways[0]):
            ways += [(True, False)] * can_offload + [(False, True)]
        for offload, keeps in ways:
            for always in (True,) if section.exchange != "update" else (False, True):
                yield {
                    "strategy": "fsdp2",
                    "exchanges_always": always,
                    "cpu_offload": offload,
                    "keeps_gathered": keeps,
                    "shard_ranks": shard_ranks,
                }


def as_lines(found: list[Choice], config: RunConfig, device: Device, price: float | None = None) -> Iterator[str]:
    """Tell the choices, what the best one needs, and what to do if none fits. ``price``: of a device and hour."""
    best = found[0]
    load, ranks = best.load, best.load.ranks
    yield (
        f"{load.architecture.parameters:,} parameters, {load.trained:,} trained; {ranks} x {device.name} with "
        f"{device.memory_gib:.1f} GiB each; samples of {config.data.max_length} tokens at most"
    )
    yield f"{'GiB a rank':>12}  {'tokens/s':>9}  {'MFU':>4}  "
    num_fitting = sum(each.fits for each in found)
    for each in found[:SHOWN]:
        speed = f"{'-':>9}  {'-':>4}"
        if each.seconds is not None:
            speed = f"{each.seconds.tokens_per_second:9,.0f}  {each.seconds.mfu(device):4.0%}"
        missing = "" if each.fits else f"   does not fit: {(each.peak.total - each.room_bytes) / GIB:.1f} GiB too much"
        yield f"{each.peak.total / GIB:12.1f}  {speed}  {' '.join(each.overrides)}{missing}"
    if len(found) > SHOWN:
        yield f"({len(found)} choices in all, {num_fitting} fit; --json has them)"
    yield f"{'the best' if best.fits else 'the smallest'}, at its peak ({best.peak.name}), on each rank:"
    for part, size in sorted(best.peak.parts.items(), key=lambda item: -item[1]):
        if size:
            yield f"{size / GIB:12.2f} GiB  {part}"
    yield from advice(best, config) if not best.fits else _needs(best, config, device, price)


def _needs(best: Choice, config: RunConfig, device: Device, price: float | None) -> Iterator[str]:
    load, seconds = best.load, best.seconds
    if seconds is None:
        command = CALIBRATE + (f" --gpus {load.ranks}" if load.ranks > 2 else "")
        yield f"no seconds: this machine was not measured with {load.ranks} ranks; run {command}"
    else:
        causes = ", ".join(f"{name} {value:.2g}" for name, value in seconds.by_cause.items() if value)
        yield (
            f"an update: {seconds.total:.3g} s, of it {causes}; "
            f"{best.num_micro} micro-batches a rank, {seconds.tokens:,} tokens"
        )
        yield _dues(seconds.total / 3600, config.length.updates or 1000, load.ranks, device, price)
    disk = checkpoint_bytes(load) * config.checkpoint.keep
    yield (
        f"besides: {host_bytes(load) / GIB:.1f} GiB of host memory a rank for {_on_the_host(load)}, "
        f"{disk / GIB:.1f} GiB of disk for {config.checkpoint.keep} checkpoints"
    )


def _on_the_host(load: Load) -> str:
    kept = [
        *(["its parts of weights, gradients and moments"] if load.offloads else []),
        *(["blocks' inputs"] if load.recompute == "offload" else []),
        "a save in the background",
    ]
    return " and ".join(kept)


def _dues(hours_each: float, updates: int, ranks: int, device: Device, price: float | None) -> str:
    """Say time, energy and price of so many updates."""
    hours = hours_each * updates
    told = f"{updates:,} updates: {hours:.1f} h" if hours >= 1 else f"{updates:,} updates: {60 * hours:.1f} min"
    if device.watts:
        told += f" and {hours * ranks * device.watts / 1000:.1f} kWh at most ({device.watts} W each)"
    return told if price is None else f"{told}; {hours * ranks * price:,.2f} at {price:g} a device and hour"


def advice(best: Choice, config: RunConfig) -> Iterator[str]:
    """What would help, in the order of what it costs."""
    yield "nothing fits. What helps:"
    if config.model.lora is None:
        yield "  model.lora={}: train adapters: no gradients and no moments for the base"
        if config.optim.name == "adamw":
            yield "  optim.name=adamw8bit: moments of two bytes a parameter, not eight (adamw_bf16: four)"
    elif config.precision.weights == "fp32":
        yield "  precision.weights=bf16: the frozen base in half the bytes; adapters stay fp32"
    if config.model.lora is not None and config.model.quantize == "none":
        yield "  model.quantize=nf4: the frozen base in 4 bits (QLoRA)"
    if config.optim.max_grad_norm is None and not config.optim.in_backward and best.load.strategy != "ddp":
        yield "  optim.in_backward=true: no gradients are kept"
    if best.load.strategy == "single" or (config.strategy.name == "ddp" and config.model.quantize == "none"):
        yield "  more GPUs with strategy.name=fsdp2: each keeps its part of weights, gradients and moments"
    yield "  a smaller data.max_length"


def as_object(found: list[Choice], device: Device) -> dict[str, object]:
    """Give all choices as plain values."""
    return {
        "device": {name: value for name, value in vars(device).items() if name != "rates"},
        "choices": [
            {
                "fits": each.fits,
                "overrides": each.overrides,
                "peak_bytes": each.peak.total,
                "when": each.peak.name,
                "bytes": each.peak.parts,
                "seconds_of_update": each.seconds and each.seconds.by_cause,
                "tokens_per_second": each.seconds and each.seconds.tokens_per_second,
                "mfu": each.seconds and each.seconds.mfu(device),
                "num_micro_batches": each.num_micro,
                "host_bytes": host_bytes(each.load),
                "checkpoint_bytes": checkpoint_bytes(each.load),
            }
            for each in found
        ],
    }
