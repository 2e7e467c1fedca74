"""Activation checkpointing: compute in backward again what forward did not keep (Chen et al. 2016), block by block.

full: a block keeps its input. selective: also what its products and its attention gave, which cost most to compute;
the rest (norms, rotary embedding, activation functions, casts) is done again. offload: full, with the inputs in host
memory. All of them are exact. Not reentrant, so that frozen and unused parameters are fine.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

FEWEST_TERMS = 256  # of a product's sums: one of fewer (an adapter's) is cheaper to do again than to keep
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_KERNELS = ("torch_attn", "flash_attn")  # namespaces of attention's kernels besides torch's own


def recompute(model: Any, how: str) -> None:
    """Let the blocks of a transformers model compute again; ``how``: selective, full or offload."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again = partial(checkpoint, use_reentrant=False)
    if how == "selective":
        contexts = partial(create_selective_checkpoint_contexts, _policy)
        again = partial(again, context_fn=contexts)
    elif how == "offload":
        again = partial(_with_inputs_on_host, again)
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=again)


def _policy(_context: Any, operation: Any, *args: Any, **_kwargs: Any) -> CheckpointPolicy:
    is_kept = operation in _PRODUCTS and args[-1].shape[0] >= FEWEST_TERMS
    is_kept |= operation.namespace in _KERNELS or "scaled_dot_product" in operation.name()
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _with_inputs_on_host(again: Any, block: Any, *inputs: Any) -> Any:
    """Run a block; autograd is given its ``inputs`` alone to keep: inside, checkpointing keeps nothing."""
    with torch.autograd.graph.saved_tensors_hooks(to_host, from_host):
        return again(block, *inputs)


def to_host(tensor: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
    """Copy to the host, on a GPU into memory that it can write by itself, in the order of its stream."""
    on_gpu = tensor.device.type == "cuda"
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
    return tensor.device, host.copy_(tensor, non_blocking=on_gpu)


def from_host(kept: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
    """Bring it back to its device."""
    device, host = kept
    return host.to(device, non_blocking=True)
