"""What a model of any architecture keeps for backward, found by running it without memory (torch's FakeTensorMode).

For the planner, where it has no formulas. Parameters are counted; what autograd saves in the blocks is weighed at three
lengths, and the parabola through them says what a token costs, and a pair of tokens. The model is built from its
config.json as a run builds it: formats, autocast, adapters. Attention counts as FlashAttention, dropout as on a GPU.
It refuses what transformers cannot build without remote code, and what cannot be run without values (some mixtures).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from unisono.config.schema import ModelSection
from unisono.errors import ModelError
from unisono.model.load import adapt, base_model
from unisono.model.stream import hollow_model

NAME = "traced"
LENGTHS = (64, 128, 192)  # tokens of a document


@dataclass(frozen=True)
class Trace:
    """Counts of a model, and bytes that one of its blocks keeps for backward, in the mean."""

    parameters: int
    trained: int
    layers: int
    block: int  # parameters of a block
    matrices: int  # those of them that are multiplied
    hidden: int
    heads: int
    vocabulary: int
    is_tied: bool
    kept_by_token: float
    kept_by_pair: float  # of tokens of one document, where attention keeps a matrix


def trace(folder: Path, section: ModelSection, *, weights: str, compute: str) -> Trace:
    """Build the model of ``folder`` without memory, and weigh what its forward keeps.

    ``weights`` and ``compute`` are formats as torch names them. Raises ModelError.
    """
    _register_attention()
    for name in ("torch._subclasses.fake_tensor", "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what fails is told by us
    try:
        return _trace(folder, section, _dtype(weights), _dtype(compute))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(
            f"the model can be planned neither by formula nor by running it without memory: {reason}",
            where=str(folder),
            hint="model.attention=eager helps where the model has an attention of its own; train tries the fullest "
            "micro-batch before update 1, whatever the architecture",
        ) from error


def _trace(folder: Path, section: ModelSection, weights: torch.dtype, compute: torch.dtype) -> Trace:
    chosen = NAME if section.attention in {"auto", "document"} else section.attention
    causal_lm: Any = hollow_model(folder, trust_remote_code=False, dtype=weights, attn_implementation=chosen)
    own, blocks = list(causal_lm.parameters()), _blocks(causal_lm)
    in_blocks = list(blocks.parameters())
    model = causal_lm if section.lora is None else adapt(causal_lm, section.lora, hollow=True)
    _keep_masks_of_dropout(model.train())
    with FakeTensorMode(allow_non_fake_inputs=True):
        _pretend(model)
        kept = [_kept_in_blocks(base_model(model), blocks, tokens, compute) for tokens in LENGTHS]
    by_pair, by_token, _ = np.polyfit(LENGTHS, kept, 2) / len(blocks)
    config = causal_lm.config.get_text_config()
    head, embedding = causal_lm.get_output_embeddings(), causal_lm.get_input_embeddings()
    return Trace(
        parameters=sum(each.numel() for each in own),
        trained=sum(each.numel() for each in model.parameters() if each.requires_grad),
        layers=len(blocks),
        block=sum(each.numel() for each in in_blocks) // len(blocks),
        matrices=sum(each.numel() for each in in_blocks if each.ndim > 1) // len(blocks),
        hidden=int(config.hidden_size),
        heads=int(config.num_attention_heads),
        vocabulary=int(config.vocab_size),
        is_tied=head.weight is embedding.weight,
        kept_by_token=float(by_token),
        kept_by_pair=float(by_pair),
    )


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _pretend(model: torch.nn.Module) -> None:
    """Replace parameters without memory by fake ones on the CPU, where autocast works; tied ones stay tied."""
    fakes: dict[torch.Tensor, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in fakes:
                values = torch.empty(parameter.shape, dtype=parameter.dtype)
                fakes[parameter] = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
            module.register_parameter(name, fakes[parameter])


def _blocks(model: torch.nn.Module) -> torch.nn.ModuleList:
    """Return the list of modules that holds most parameters, as ``strategy.fsdp2`` does."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of blocks")
    return max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))


def _kept_in_blocks(causal_lm: Any, blocks: torch.nn.ModuleList, tokens: int, compute: torch.dtype) -> int:
    """Return the bytes of all storages that autograd saves while a block runs, parameters left out."""
    own = {parameter.untyped_storage()._cdata for parameter in causal_lm.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}
    inside: list[torch.nn.Module] = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if inside and storage._cdata not in own:
            kept[storage._cdata] = storage  # held, so that no other takes its place
        return tensor

    handles = [block.register_forward_pre_hook(lambda block, _: inside.append(block)) for block in blocks]
    handles += [block.register_forward_hook(lambda *_: inside.clear()) for block in blocks]
    is_half = compute != torch.float32
    with (
        torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor),
        torch.autocast("cpu", dtype=compute if is_half else torch.bfloat16, enabled=is_half),
    ):
        ids, places = torch.zeros(1, tokens, dtype=torch.long), torch.arange(tokens)[None]
        causal_lm.get_decoder()(input_ids=ids, position_ids=places, use_cache=False)
    for handle in handles:
        handle.remove()
    return sum(storage.nbytes() for storage in kept.values())


class _Flash(torch.autograd.Function):
    """Attention in shapes alone, that keeps what FlashAttention keeps: its inputs, its output, a log-sum for each row.

    ``query``, ``key``, ``value``: ``[rows, tokens, heads, head]``; returns the same.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Make room for the output."""
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output


class _Dropout(torch.autograd.Function):
    """Dropout in shapes alone, that keeps a bool for each value, as on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Make room for the mask and for what is left."""
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)


def _register_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    def attend(_: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *__: Any, **___: Any) -> Any:
        is_half = torch.is_autocast_enabled("cpu")
        dtype = torch.get_autocast_dtype("cpu") if is_half else query.dtype
        # the kernels take whole rows: what is a part of a larger product is copied
        rows = (each.to(dtype).transpose(1, 2).contiguous() for each in (query, key, value))
        return _Flash.apply(*rows), None  # type: ignore[no-untyped-call]

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)


def _keep_masks_of_dropout(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout) and module.p > 0:
            module.forward = _Dropout.apply  # type: ignore[method-assign]
