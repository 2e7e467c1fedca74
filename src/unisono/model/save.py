"""Write the final model so that transformers (or peft, for adapters) loads it as it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from unisono.durable import swap, sync_folder
from unisono.errors import OutputError
from unisono.model.write import gathered, named_once, write_weights

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
)


def hand_over(model: Any, source: Path, folder: Path, *, base: str, writes: bool) -> None:
    """Collective. Write ``model`` (transformers or peft) with ``source``'s tokenizer into ``folder``, by one rename.

    One rank ``writes``. The weights are those that were trained, gathered one tensor at a time. An adapter names
    ``base``, the model it belongs to.
    """
    tensors = None if isinstance(model, _peft_model()) else named_once(model, source)
    if tensors is None:
        state = full_state(model, keeps=writes)
        if writes:
            _publish(model, source, folder, base, lambda private: model.save_pretrained(private, state_dict=state))
        return
    pieces = gathered(tensors, keeps=writes)

    def write(private: Path) -> None:
        model.save_pretrained(private, state_dict={})  # configurations
        write_weights(private, tensors, pieces)

    try:
        if writes:
            _publish(model, source, folder, base, write)
    finally:
        for _ in pieces:  # also where writing failed: the others gather
            pass


def full_state(model: Any, *, keeps: bool) -> dict[str, torch.Tensor]:
    """Collective. Return the whole tensors of ``model`` on the CPU of the ranks that ``keeps`` them, else nothing.

    Shards are gathered one tensor at a time. Of a peft model only what is trained is needed, the adapters.
    """
    whole: dict[torch.Tensor, torch.Tensor] = {}  # tied parameters have several names and one tensor
    state = {}
    is_adapted = isinstance(model, _peft_model())
    for name, tensor in model.state_dict(keep_vars=True).items():
        if is_adapted and not tensor.requires_grad:
            continue
        if tensor not in whole:
            data = tensor.detach()
            whole[tensor] = data.full_tensor() if isinstance(data, DTensor) else data
            whole[tensor] = whole[tensor].cpu() if keeps else torch.empty(0)
        state[name] = whole[tensor]
    return state if keeps else {}


def _publish(model: Any, source: Path, folder: Path, base: str, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a private folder, add the tokenizer, publish it; OutputError if the disk does not let it."""
    from safetensors import SafetensorError

    private = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(private, ignore_errors=True)
    _name_base(model, base)
    try:
        private.mkdir(parents=True)
        write(private)
        for pattern in (*TOKENIZER_FILES, "generation_config.json"):
            for file in source.glob(pattern):
                shutil.copyfile(file, private / file.name)
        sync_folder(private)
        swap(private, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(private, ignore_errors=True)
        raise OutputError(
            f"the model cannot be written: {error}",
            where=str(folder),
            hint="make room if the disk is full; the same command then goes on from the last checkpoint",
        ) from error


def _peft_model() -> type[Any]:
    from peft import PeftModel

    return PeftModel


def _name_base(model: Any, base: str) -> None:
    if isinstance(model, _peft_model()):
        for settings in model.peft_config.values():
            settings.base_model_name_or_path = base
