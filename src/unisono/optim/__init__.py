"""Optimizers and the learning rate, which is a pure function of the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from unisono.config.schema import OptimSection
from unisono.optim.lean import LeanAdamW, empty_moments

_LEAN = {"adamw8bit": torch.uint8, "adamw_bf16": torch.bfloat16}


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


def moments(section: OptimSection, parameter: torch.Tensor) -> list[torch.Tensor]:
    """Return zeros like what the optimizer's first step makes for a parameter: where it lies, and cut as it is."""
    if section.name in _LEAN:
        return list(empty_moments(parameter, _LEAN[section.name]).values())
    count = 2 if section.name == "adamw" else int(section.momentum > 0)
    return [torch.zeros_like(parameter.detach()) for _ in range(count)]


def moment_bytes(section: OptimSection, parameter: torch.Tensor) -> int:
    """Return the bytes that the optimizer keeps for a parameter, of all its parts together."""
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return sum(each.nbytes for each in moments(section, whole))


def build_optimizer(
    section: OptimSection, named_parameters: Iterable[tuple[str, torch.nn.Parameter]], *, seed: int = 0
) -> torch.optim.Optimizer:
    """Build the optimizer over the trainable parameters; vectors (norms, biases) are not decayed.

    ``seed``: of what is rounded at random, where moments are kept in bf16.
    """
    trainable = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if section.name in _LEAN:
        moments = _LEAN[section.name]
        return LeanAdamW(groups, moments=moments, seed=seed, lr=section.lr, betas=section.betas, eps=section.eps)
    if section.name == "sgd":
        return torch.optim.SGD(groups, lr=section.lr, momentum=section.momentum)
    return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)


def steps_alone(optimizer: torch.optim.Optimizer) -> Callable[[torch.nn.Parameter], None]:
    """Return what takes the step of one parameter, as ``optimizer.step()`` would among all."""
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}

    def step(parameter: torch.nn.Parameter) -> None:
        whole = optimizer.param_groups
        optimizer.param_groups = [groups[parameter] | {"params": [parameter]}]
        try:
            optimizer.step()
        finally:
            optimizer.param_groups = whole

    return step


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

    What has a parameter's rows lies where the parameter does, and sharded as it is; a count of steps on the CPU.
    """
    parameters = dict(named_parameters)
    tensors = {}
    for full, (shape, dtype) in stored.items():
        name, key = full.rsplit("/", 1)
        like = parameters.get(name)
        if like is None:
            continue
        if key == "step":
            tensors[full] = torch.zeros(shape, dtype=dtype)
            continue
        values = like.detach()
        if shape != like.shape:  # a scale stands for a block of values
            values = values[..., :: like.shape[-1] // shape[-1]]
        tensors[full] = torch.zeros_like(values, dtype=dtype)
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
        on_device = value.to(parameters[name].device) if key == "step" and _is_fused(optimizer) else value
        optimizer.state[parameters[name]][key] = on_device


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer.defaults.get("fused"))
