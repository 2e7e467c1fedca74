"""Read weights piece by piece: a rank of a sharded model holds its own rows and never the whole.

``hollow_model`` builds a model whose parameters have shapes and no memory (meta device) while its buffers, such as
rotary tables, are computed as usual; once a strategy has sharded it, ``fill`` gives every shard memory and reads the
rows that belong to it. Only files whose tensors are named as the parameters are can be read so: see ``can_stream``.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from unisono.dist import first_row


def hollow_model(folder: Path, *, trust_remote_code: bool, **settings: Any) -> torch.nn.Module:
    """Build the causal language model of ``folder`` without memory for its parameters.

    ``settings`` are those of ``from_pretrained``: ``dtype``, ``attn_implementation``.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    with _without_memory():
        model: torch.nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, trust_remote_code=trust_remote_code, **settings
        )
    return model


@contextmanager
def _without_memory() -> Iterator[None]:
    """Send each parameter to the meta device as it is registered; one that is there already stays the same object."""

    def send(_module: torch.nn.Module, _name: str, parameter: torch.nn.Parameter) -> torch.nn.Parameter | None:
        if parameter.is_meta:
            return None
        return torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(send)  # type: ignore[arg-type]  # it may return a parameter
    try:
        yield
    finally:
        handle.remove()


def is_hollow(model: torch.nn.Module) -> bool:
    """Tell whether there are parameters without memory."""
    return any(parameter.is_meta for parameter in model.parameters())


def can_stream(model: torch.nn.Module, folder: Path) -> bool:
    """Tell whether every hollow parameter is found in the files under its name, with its shape."""
    files = _files_by_name(folder)
    for parameter, names in _names(model).items():
        stored = [name for name in names if name in files]
        if not stored:
            return False
        with safe_open(files[stored[0]], "pt") as tensors:
            if tuple(tensors.get_slice(stored[0]).get_shape()) != tuple(parameter.shape):
                return False
    return True


@torch.no_grad()
def fill(model: torch.nn.Module, folder: Path, device: torch.device) -> None:
    """Give hollow parameters memory on ``device`` and read them, each rank its rows; also the buffers that are stored.

    Parameters become new objects; tied ones stay tied. A file is opened for each tensor and closed again: what was
    mapped of it would otherwise stay in memory beside the weights.
    """
    if not is_hollow(model):
        return
    files = _files_by_name(folder)
    filled: dict[torch.Tensor, torch.nn.Parameter] = {}
    for parameter, names in _names(model).items():
        values = _stored(parameter, names, files, device)
        filled[parameter] = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter in filled:
                module.register_parameter(name, filled[parameter])
    for name, buffer in model.named_buffers():
        if name in files and name in model.state_dict():
            _read(buffer, name, files[name])


def reader(model: torch.nn.Module, folder: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what gives a parameter's values: those it has, or for a hollow one those in the files."""
    names, files = _names(model), _files_by_name(folder)

    def read(parameter: torch.Tensor) -> torch.Tensor:
        if not parameter.is_meta:
            return parameter.detach()
        return _stored(parameter, names[parameter], files, torch.device("cpu"))

    return read


def _stored(parameter: torch.Tensor, names: list[str], files: dict[str, Path], device: torch.device) -> torch.Tensor:
    """Return the values of a hollow parameter, sharded as it is."""
    values = torch.empty_like(parameter.detach(), device=device)
    name = next(name for name in names if name in files)
    _read(values, name, files[name])
    return values


def _names(model: torch.nn.Module) -> dict[torch.Tensor, list[str]]:
    """Return each hollow parameter's names in the files; a tied one has several, an adapted layer's lost a prefix."""
    names: dict[torch.Tensor, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_meta:
            names[parameter].append(name.replace(".base_layer.", "."))
    return names


def _files_by_name(folder: Path) -> dict[str, Path]:
    """Return the safetensors file of each stored tensor; empty when there is none."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in files.items()}
    if not single.is_file():
        return {}
    with safe_open(single, "pt") as tensors:
        return dict.fromkeys(tensors.keys(), single)


def _read(target: torch.Tensor, name: str, file: Path) -> None:
    """Copy a stored tensor, or this rank's rows of it, into ``target``, whose format it takes."""
    local, start = target.to_local() if isinstance(target, DTensor) else target, first_row(target)
    if local.numel() == 0:
        return
    with safe_open(file, "pt") as tensors:
        stored = tensors.get_slice(name)
        local.copy_(stored[start : start + local.shape[0]] if local.ndim else tensors.get_tensor(name))
