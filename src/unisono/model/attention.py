"""Attention for packed rows, exact per document: causal inside a document, nothing across.

Registered with transformers under the name ``document``. The boundaries come as ``document_lengths``, which covers the
row-major tokens of the batch; no mask of tokens x tokens is ever built.

* CUDA, half precision: torch's ``varlen_attn`` (torch >= 2.10), else FlashAttention when it is installed.
* CPU, half precision, documents of at most 512 tokens: three batched products each (``products``).
* otherwise (fp32, longer ones, torch 2.8 without FlashAttention): one causal SDPA call per document.
* soft-capping: computed by hand per document; sliding windows: exact in every path.

It refuses, by name: attention sinks, attention that is not causal, and models that do not hand the boundaries on.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from unisono.errors import ModelError
from unisono.model.products import LONGEST, ShortAttention

NAME = "document"


def register() -> None:
    """Make ``attn_implementation="document"`` known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, document_attention)


def document_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    document_lengths: Sequence[int] | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each document; transformers' attention interface.

    ``query``: ``[rows, heads, tokens, head]``; ``key`` and ``value`` may have fewer heads (grouped queries).
    Returns ``[rows, tokens, heads, head]``. ``attention_mask`` is not used: padding is a document of its own.
    """
    name = type(module).__name__
    if document_lengths is None:
        raise ModelError(
            f"{name} does not hand document_lengths on to its attention",
            where="model.attention",
            hint="set model.attention=eager or sdpa and data.pack=false for this model",
        )
    if s_aux is not None or position_bias is not None or is_causal is False:
        what = "attention sinks" if s_aux is not None else "a position bias or attention that is not causal"
        raise ModelError(
            f"{name} uses {what}, which document attention does not compute",
            where="model.attention",
            hint="set model.attention=eager",
        )
    rows, _heads, tokens, _head = query.shape
    dtype = _compute_dtype(query)
    query, key, value = (_flatten_rows(x).to(dtype) for x in (query, key, value))
    output = _attend(query, key, value, document_lengths, scaling, dropout, sliding_window, softcap)
    return output.reshape(rows, tokens, output.shape[1], output.shape[2]), None


def _compute_dtype(query: torch.Tensor) -> torch.dtype:
    """Under autocast rotary embeddings leave fp32 queries beside half-precision values: bring them together."""
    device = query.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype


def _flatten_rows(x: torch.Tensor) -> torch.Tensor:
    """``[rows, heads, tokens, head] -> [heads, rows * tokens, head]``, a view for a single row."""
    return x.squeeze(0) if x.shape[0] == 1 else x.transpose(0, 1).flatten(1, 2)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    scaling: float | None,
    dropout: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """``[heads, tokens, head]`` each, to ``[tokens, heads, head]``."""
    if softcap is None and dropout == 0.0 and query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        kernel = _variable_length_kernel()
        if kernel is not None:
            output: torch.Tensor = kernel(query, key, value, lengths, scaling, window)
            return output
    documents = zip(*(torch.split(x, list(lengths), dim=1) for x in (query, key, value)))
    parts = [_one_document(q, k, v, scaling, dropout, window, softcap) for q, k, v in documents]
    return torch.cat(parts, dim=1).transpose(0, 1)


def _one_document(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    dropout: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Causal attention over one document, ``[heads, tokens, head]``; ``key`` and ``value`` may have fewer heads."""
    tokens = query.shape[1]
    reach = tokens if window is None else window
    if _is_for_products(query, dropout, softcap) and reach >= tokens:
        output: torch.Tensor = ShortAttention.apply(query, key, value, scaling)  # type: ignore[no-untyped-call]
        return output
    groups = query.shape[0] // key.shape[0]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=0) for x in (key, value))
    if softcap is None and reach >= tokens:
        return _sdpa(query, key, value, scale=scaling, dropout_p=dropout, is_causal=True)
    place = torch.arange(tokens, device=query.device)
    distance = place[:, None] - place[None, :]
    allowed = (distance >= 0) & (distance < reach)
    if softcap is None:
        return _sdpa(query, key, value, attn_mask=allowed, scale=scaling, dropout_p=dropout)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.tanh(query @ key.transpose(1, 2) * scale / softcap) * softcap
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1, dtype=torch.float32).to(query.dtype)
    return F.dropout(weights, dropout) @ value


def _is_for_products(query: torch.Tensor, dropout: float, softcap: float | None) -> bool:
    """Tell whether plain products are the faster way: short, on a CPU, in half precision."""
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    return query.device.type == "cpu" and is_half and query.shape[1] <= LONGEST and not dropout and softcap is None


def _sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **settings: Any) -> torch.Tensor:
    """SDPA wants a batch dimension to choose its fused kernels."""
    return F.scaled_dot_product_attention(query[None], key[None], value[None], **settings)[0]


@functools.cache
def _variable_length_kernel() -> Any:
    """Return the best variable-length kernel of this installation, or None; looked up once, not in every layer."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is not None:
        return _torch_varlen
    if importlib.util.find_spec("flash_attn") is not None:
        return _flash_attn
    return None


def _boundaries(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device, non_blocking=True)


def _torch_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """torch.nn.attention.varlen; a window of w tokens looks back w - 1 and ahead 0."""
    from torch.nn.attention.varlen import varlen_attn

    ends = _boundaries(lengths, query.device)
    longest = max(lengths)
    q, k, v = (x.transpose(0, 1).contiguous() for x in (query, key, value))
    output = varlen_attn(
        q,
        k,
        v,
        ends,
        ends,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(output, torch.Tensor)  # a tuple comes only with return_aux
    return output


def _flash_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """flash-attn's variable-length function; grouped queries are native there."""
    from flash_attn import flash_attn_varlen_func

    ends = _boundaries(lengths, query.device)
    longest = max(lengths)
    output: torch.Tensor = flash_attn_varlen_func(
        *(x.transpose(0, 1).contiguous() for x in (query, key, value)),
        ends,
        ends,
        longest,
        longest,
        softmax_scale=scaling,
        causal=True,
        window_size=(-1 if window is None else window - 1, 0),
    )
    return output
