"""Write the final model so that transformers (or peft, for adapters) loads it as it is."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from unisono.durable import swap, sync_folder
from unisono.errors import OutputError

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
)


def full_state(model: Any, *, keeps: bool) -> dict[str, torch.Tensor]:
    """Collective. Return the whole tensors of ``model`` on the CPU of the ranks that ``keeps`` them, else nothing.

    Shards are gathered one tensor at a time. Of a peft model only what is trained is needed, the adapters.
    """
    from peft import PeftModel

    whole: dict[torch.Tensor, torch.Tensor] = {}  # tied parameters have several names and one tensor
    state = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(model, PeftModel) and not tensor.requires_grad:
            continue
        if tensor not in whole:
            data = tensor.detach()
            whole[tensor] = data.full_tensor() if isinstance(data, DTensor) else data
            whole[tensor] = whole[tensor].cpu() if keeps else torch.empty(0)
        state[name] = whole[tensor]
    return state if keeps else {}


def save_model(model: Any, source: Path, folder: Path, *, base: str, state: dict[str, torch.Tensor]) -> None:
    """Write ``model`` (transformers or peft) with the tokenizer of ``source`` into ``folder``, by one rename.

    The weights are those of ``state``, as they were trained. An adapter names ``base``, the model it belongs to.
    """
    from safetensors import SafetensorError

    private = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(private, ignore_errors=True)
    _name_base(model, base)
    try:
        private.mkdir(parents=True)
        model.save_pretrained(private, state_dict=state)
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


def _name_base(model: Any, base: str) -> None:
    from peft import PeftModel

    if isinstance(model, PeftModel):
        for settings in model.peft_config.values():
            settings.base_model_name_or_path = base
