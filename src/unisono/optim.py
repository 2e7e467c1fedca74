"""Optimizers and the learning rate, which is a pure function of the update."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from unisono.bits import bitsandbytes
from unisono.config.schema import OptimSection

LEAST_8BIT, BLOCK_8BIT = 4096, 256  # values: of a parameter whose moments have 8 bits, and of a block of them


def peak_rate(section: OptimSection, global_size: int | None) -> float:
    """Return the peak learning rate, scaled to the global batch only if ``lr_scaling`` asks for it.

    linear: Goyal et al. 2017 (SGD); sqrt: Krizhevsky 2014, Malladi et al. 2022 (Adam).
    """
    if section.lr_scaling == "none" or section.lr_reference_batch is None or global_size is None:
        return section.lr
    ratio = global_size / section.lr_reference_batch
    return section.lr * (ratio if section.lr_scaling == "linear" else math.sqrt(ratio))


def warmup_updates(section: OptimSection, total: int) -> int:
    """Return the number of warm-up updates; a share is rounded up."""
    return section.warmup if isinstance(section.warmup, int) else math.ceil(section.warmup * total)


def rate(section: OptimSection, update: int, total: int, peak: float) -> float:
    """Return the learning rate of ``update`` (from 1) of ``total``.

    Warm-up rises linearly and reaches the peak at its last update. Of the t remaining updates the k-th (from 0) has
    1 - k/t of the peak (linear) or (1 + cos(pi k/t)) / 2 of it (cosine).
    """
    warmup = min(warmup_updates(section, total), total)
    if update <= warmup:
        return peak * update / warmup
    progress = (update - 1 - warmup) / (total - warmup)
    if section.schedule == "linear":
        return peak * (1.0 - progress)
    if section.schedule == "cosine":
        return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak


def moment_bytes(section: OptimSection, parameter: torch.Tensor) -> int:
    """Return the bytes that the optimizer keeps for a parameter.

    In 8 bits a large one's moments have a byte a value, and a scale in fp32 for each block of values.
    """
    values = parameter.numel()
    if section.name == "sgd":
        return parameter.nbytes if section.momentum > 0 else 0
    if section.name == "adamw":
        return 2 * parameter.nbytes
    return 2 * (4 * values if values < LEAST_8BIT else values + 4 * -(-values // BLOCK_8BIT))


def build_optimizer(
    section: OptimSection, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]
) -> torch.optim.Optimizer:
    """Build the optimizer over the trainable parameters; vectors (norms, biases) are not decayed.

    The fused AdamW is used where every parameter's device has it.
    """
    trainable = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if section.name == "adamw8bit":
        return bitsandbytes().optim.AdamW8bit(  # type: ignore[no-any-return]
            groups, lr=section.lr, betas=section.betas, eps=section.eps, min_8bit_size=LEAST_8BIT
        )
    if section.name == "sgd":
        return torch.optim.SGD(groups, lr=section.lr, momentum=section.momentum)
    return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = value


def optimizer_state(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]
) -> dict[str, torch.Tensor]:
    """Return the optimizer's tensors as ``{parameter name}/{key}``: by name, never by position."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in named_parameters}
    return {
        f"{names[parameter]}/{key}": value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if value is not None  # a momentum that has not begun
    }


def empty_state(
    stored: Mapping[str, tuple[torch.Size, torch.dtype]], named_parameters: Iterable[tuple[str, torch.nn.Parameter]]
) -> dict[str, torch.Tensor]:
    """Return tensors to load ``{parameter name}/{key}`` into, for those of the given parameters.

    What has a parameter's shape lies where the parameter does, and sharded as it is; a count of steps on the CPU.
    """
    parameters = dict(named_parameters)
    tensors = {}
    for full, (shape, dtype) in stored.items():
        name, key = full.rsplit("/", 1)
        like = parameters.get(name)
        if like is None:
            continue
        if key != "step" and shape == like.shape:
            tensors[full] = torch.zeros_like(like.detach(), dtype=dtype)
        else:
            tensors[full] = torch.zeros(shape, dtype=dtype, device="cpu" if key == "step" else like.device)
    return tensors


def restore_state(
    optimizer: torch.optim.Optimizer,
    tensors: dict[str, torch.Tensor],
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
) -> None:
    """Put loaded tensors into the optimizer, by name."""
    parameters = dict(named_parameters)
    optimizer.state.clear()
    for full, value in tensors.items():
        name, key = full.rsplit("/", 1)
        if key == "step" and not isinstance(optimizer, torch.optim.AdamW):
            optimizer.state[parameters[name]][key] = int(value)  # as bitsandbytes counts
            continue
        on_device = value.to(parameters[name].device) if key == "step" and _is_fused(optimizer) else value
        optimizer.state[parameters[name]][key] = on_device


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer.defaults.get("fused"))
