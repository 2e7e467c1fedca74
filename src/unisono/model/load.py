"""Find a model, load it in the wanted format, put adapters in.

Loading is memory-mapped (safetensors): ranks of one host share the file's pages until the weights are cast or trained.
"""

from __future__ import annotations

import warnings
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

import torch

from unisono.config.schema import LoraSection, ModelSection
from unisono.errors import ModelError
from unisono.model import attention, stream
from unisono.model.quantize import quantize
from unisono.model.recompute import recompute
from unisono.model.starter import starter_folder

HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


def resolve_model(path: str) -> Path:
    """Turn ``model.path`` into a local folder: the starter model, a folder, or a hub id."""
    if path == "starter":
        return starter_folder()
    if Path(path).is_dir():
        return Path(path)
    if path.startswith((".", "/")) or path.count("/") != 1:
        raise ModelError(f"{path} is not a folder", where="model.path", hint="give a folder, a hub id, or 'starter'")
    return _from_hub(path)


def base_name(path: str, folder: Path) -> str:
    """Name the model so that an adapter finds it again from anywhere: a hub id as it is, else the folder, absolute."""
    return str(folder.absolute()) if path == "starter" or Path(path).is_dir() else path


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, local_files_only=_is_cached(name)))
    except (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        OSError,
    ) as error:
        raise ModelError(
            f"{name} is neither a folder nor to be had from the hub: {str(error).splitlines()[0]}",
            where="model.path",
            hint="without a network, copy the model to a folder and give that; a gated model needs `hf auth login`",
        ) from None


def _is_cached(name: str) -> bool:
    """Tell whether the hub's cache holds a complete model, so that no request is needed at all."""
    from huggingface_hub import try_to_load_from_cache

    return all(isinstance(try_to_load_from_cache(name, f), str) for f in ("config.json", "model.safetensors"))


def load_model(
    section: ModelSection, folder: Path, *, weights: torch.dtype, seed: int, hollow: bool = False
) -> torch.nn.Module:
    """Load the causal language model of ``folder``, with adapters if asked, on the CPU.

    ``seed`` fixes the adapters' first values: all ranks and all world sizes start from the same ones.
    ``hollow``: leave the weights out, for ``stream.fill`` to read after sharding, if the files allow it.
    Returns a transformers model, or a peft model around it.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    getLogger("bitsandbytes").setLevel(ERROR)  # peft imports it; it warns of kernels that are for inference
    attention.register()
    settings: dict[str, Any] = {
        "dtype": weights,
        "attn_implementation": attention.NAME if section.attention == "auto" else section.attention,
        "trust_remote_code": section.trust_remote_code,
    }
    try:
        is_packed = section.quantize != "none"
        model: Any = stream.hollow_model(folder, **settings) if hollow or is_packed else None
        if model is None or not stream.can_stream(model, folder):
            model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **settings)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"{folder} cannot be loaded as a causal language model: {error}", where="model.path"
        ) from error
    if is_packed:
        quantize(model, stream.reader(model, folder))
        stream.fill(model, folder, torch.device("cpu"))
    if section.activation_checkpointing != "none":
        recompute(model, section.activation_checkpointing)
    return model if section.lora is None else add_adapters(model, section.lora, seed)


def add_adapters(model: Any, section: LoraSection, seed: int) -> torch.nn.Module:
    """Put LoRA adapters in, in fp32; a target that matches nothing is an error."""
    with torch.random.fork_rng():
        adapted = adapt(model, section)
        _start_adapters(adapted, seed)
    return adapted


def adapt(model: Any, section: LoraSection, *, hollow: bool = False) -> torch.nn.Module:
    """Put LoRA adapters in, in fp32, with any values; ``hollow``: without memory."""
    from peft import LoraConfig, get_peft_model

    if section.targets != "all-linear":
        _refuse_unmatched(model, section.targets)
    settings = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # type: ignore[arg-type]  # peft's annotation says int, its arithmetic takes a float
        lora_dropout=section.dropout,
        target_modules=section.targets,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        # peft asks transformers under a name that is going away; nothing for the person to do
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        # and makes patterns for experts itself, which all-linear leaves alone
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match")
        adapted: torch.nn.Module = get_peft_model(model, settings, low_cpu_mem_usage=hollow)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted


def _start_adapters(adapted: torch.nn.Module, seed: int) -> None:
    """Draw the adapters' first values from ``seed`` alone; those of a hollow model get memory first."""
    from peft.tuners.lora import LoraLayer

    torch.manual_seed(seed)
    for layer in adapted.modules():
        if isinstance(layer, LoraLayer):
            for adapters in (layer.lora_A, layer.lora_B):
                if stream.is_hollow(adapters):
                    adapters.to_empty(device="cpu")
            layer.reset_lora_parameters("default", init_lora_weights=True)  # type: ignore[no-untyped-call]


def _refuse_unmatched(model: torch.nn.Module, targets: list[str]) -> None:
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    endings = sorted({name.rsplit(".", 1)[-1] for name in names})
    unmatched = [t for t in targets if not any(n == t or n.endswith(f".{t}") for n in names)]
    if unmatched:
        raise ModelError(
            f"no linear layer is called {', '.join(unmatched)}; this model has {', '.join(endings)}",
            where="model.lora.targets",
            hint="use names of the list, or all-linear",
        )


def base_model(model: Any) -> Any:
    """Return the causal language model inside a peft model, or the model itself."""
    from peft import PeftModel

    return model.get_base_model() if isinstance(model, PeftModel) else model
