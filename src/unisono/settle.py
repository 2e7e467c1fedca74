"""Settle what the run file leaves open, before anything is loaded: rank 0 asks the planner, all get its answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

import torch

from unisono.build import Inputs
from unisono.config.load import Loaded
from unisono.config.schema import RunConfig
from unisono.data.stream import StreamPlan
from unisono.dist import World, agree, gather, gather_texts
from unisono.errors import ConfigError, ModelError
from unisono.plan.architecture import read_architecture
from unisono.plan.auto import Decision, decide
from unisono.plan.hardware import Device, of_name
from unisono.plan.here import PROCESS_BYTES, cpu, host_memory
from unisono.precision import multiplies_bf16


def settle(loaded: Loaded, inputs: Inputs, world: World, compute: str, say: Callable[[str], None]) -> Decision:
    """Collective. Return the planner's answer for the rank with the least memory, which is the same on all ranks.

    Raises ConfigError, on all ranks, when nothing fits. What the planner does not know is told, and left as it is.
    """
    device = _scarcest(world)
    answer = agree(json.dumps(_ask(loaded, inputs, world, compute, device) if world.is_first else {}))
    told = json.loads(answer)
    if "refused" in told:
        raise ConfigError(told["refused"], where=told["where"], hint=told["hint"])
    decision = Decision(**told)
    if decision.line is not None:
        say(decision.line)
    return decision


def _ask(loaded: Loaded, inputs: Inputs, world: World, compute: str, device: Device) -> dict[str, object]:
    train, config = inputs.data.train, _computing(loaded.config, compute)
    longest = config.data.max_length if isinstance(train, StreamPlan) else train.longest
    if longest == "auto":
        return asdict(Decision({}, "auto: the longest sample of a stream is not known: nothing is planned"))
    try:
        shape = read_architecture(inputs.folder)
    except ModelError as error:
        return asdict(Decision({}, f"auto: nothing is planned: {error.message}"))
    try:
        return asdict(decide(config, loaded.origins, shape, device, world.size, longest))
    except ConfigError as error:
        return {"refused": error.message, "where": error.where, "hint": error.hint}


def _computing(config: RunConfig, compute: str) -> RunConfig:
    return config.model_copy(update={"precision": config.precision.model_copy(update={"compute": compute})})


def _scarcest(world: World) -> Device:
    """Collective. Return the device with the least memory of all ranks; ranks of one host share its memory."""
    if world.device.type == "cuda":
        seen = torch.cuda.get_device_properties(world.device)
        name, memory = seen.name, seen.total_memory
    else:
        name, memory = "", host_memory() // world.local_size - PROCESS_BYTES
    sizes = [size for (size,) in gather([memory])]
    names = gather_texts(name)
    least = min(range(len(sizes)), key=sizes.__getitem__)
    if names[least]:
        return of_name(names[least], int(sizes[least]))
    return cpu(int(sizes[least]), has_bf16=multiplies_bf16(world.device))
