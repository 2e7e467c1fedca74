"""The training model: decoder, then the summed loss of the target positions alone.

Logits are computed only where a token has a loss, a chunk at a time, with their gradient in the same pass: the
``[tokens, vocabulary]`` matrix never exists. What the model does to its logits (soft-capping,
scaling) is done here too; ``verify`` compares with the model's own forward and refuses a model that differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from unisono.errors import ModelError

CHUNK_BYTES = 32 * 2**20  # of fp32 logits; larger chunks gain nothing on CPU, smaller ones starve a GPU
GROUP_BYTES = 128 * 2**20  # of the logits' gradient, which the two products of backward take in one piece
PROBE_LENGTHS = (5, 7)


@dataclass(frozen=True)
class Tolerance:
    """By how much we may differ from a model's own forward: a head given its states, and the states themselves."""

    head: float
    states: float


TOLERANCES = {torch.float32: Tolerance(1e-3, 1e-3), torch.bfloat16: Tolerance(1e-2, 1e-1)}  # bf16 keeps 8 bits


@dataclass(frozen=True)
class LogitTransform:
    """``logits = cap * tanh(scale * raw / cap)``; without a cap ``scale * raw``."""

    scale: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, config: dict[str, Any]) -> LogitTransform:
        """Read it from a model's configuration: Cohere's logit_scale, Granite's logits_scaling, Gemma's soft cap."""
        scale = float(config.get("logit_scale") or 1.0) / float(config.get("logits_scaling") or 1.0)
        return cls(scale, config.get("final_logit_softcapping"))

    def forward(self, raw: torch.Tensor) -> torch.Tensor:
        """Transform fp32 logits; may work in place."""
        logits = raw if self.scale == 1.0 else raw.mul_(self.scale)
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def backward(self, grad: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Turn the gradient of the transformed logits into that of the raw ones."""
        if self.cap is not None:
            grad = grad * (1.0 - (logits / self.cap) ** 2)
        return grad if self.scale == 1.0 else grad.mul_(self.scale)


class SummedCrossEntropy(torch.autograd.Function):
    """Sum of ``-log p(target)`` over positions, gradient included, in chunks.

    Forward takes hidden states ``[positions, width]``, the head's weight ``[vocabulary, width]`` and bias
    ``[vocabulary]`` (or None), and target ids ``[positions]``. With z the fp32 logits,
    dL/dz = softmax(z) - onehot(target).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        transform: LogitTransform,
        chunk: int,
        compute: torch.dtype,
    ) -> torch.Tensor:
        """Return the summed loss (fp64: a sum over thousands of tokens) and keep the gradients for backward."""
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        w = weight.to(compute)
        needs_any = any(ctx.needs_input_grad[:3])
        grad_hidden = torch.zeros_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias and bias is not None else None
        loss = hidden.new_zeros((), dtype=torch.float64)
        group = max(chunk, GROUP_BYTES // (compute.itemsize * len(weight)) // chunk * chunk)
        for first in range(0, len(targets), group):
            h = hidden[first : first + group].to(compute)
            low = h.new_empty(len(h), len(weight)) if needs_any else None
            for start in range(0, len(h), chunk):
                part = slice(start, start + chunk)
                raw = F.linear(h[part], w, None if bias is None else bias.to(compute)).float()
                target = targets[first + start : first + min(start + chunk, len(h)), None]
                loss += cross_entropy(raw, target, transform, None if low is None else low[part], grad_bias)
            if low is not None and grad_hidden is not None:
                grad_hidden[first : first + group] = low @ w
            if low is not None and grad_weight is not None:
                _add_outer(grad_weight, low, h)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Scale the stored gradients; they are handed out once."""
        hidden, weight, bias = ctx.saved_tensors
        hidden = None if hidden is None else hidden.mul_(grad_output)
        weight, bias = (None if g is None else g.mul_(grad_output).to(ctx.weight_dtype) for g in (weight, bias))
        return hidden, weight, bias, None, None, None, None


def cross_entropy(
    raw: torch.Tensor,
    target: torch.Tensor,
    transform: LogitTransform,
    low: torch.Tensor | None,
    grad_bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return the summed loss of fp32 logits ``[positions, vocabulary]``, which it uses up; targets ``[positions, 1]``.

    The gradient of the logits is written into ``low`` and its sum added to ``grad_bias``, where they are wanted.
    """
    logits = transform.forward(raw)
    maximum = logits.amax(-1, keepdim=True)
    picked = logits.gather(-1, target)
    grad = (logits - maximum if transform.cap is not None else logits.sub_(maximum)).exp_()
    total = grad.sum(-1, keepdim=True)
    if low is not None:
        grad.div_(total).scatter_add_(-1, target, torch.full_like(picked, -1.0))
        grad = transform.backward(grad, logits)
        low.copy_(grad)
        if grad_bias is not None:
            grad_bias += grad.sum(0)
    return (total.log() + maximum - picked).sum(dtype=torch.float64)


def _add_outer(total: torch.Tensor, grad: torch.Tensor, hidden: torch.Tensor) -> None:
    """``total += grad^T hidden``; summed in fp32 whatever the products are computed in."""
    if grad.dtype == torch.float32:
        total.addmm_(grad.t(), hidden)
    else:
        total += grad.t() @ hidden


class TrainingModel(nn.Module):
    """A causal language model whose forward is the summed loss of a micro-batch.

    It is what strategies wrap: one forward, one backward, all trainable parameters inside.
    """

    def __init__(self, causal_lm: Any, *, document_attention: bool) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self._document_attention = document_attention
        self._transform = LogitTransform.of(causal_lm.config.get_text_config().to_dict())

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        predictors: torch.Tensor,
        target_ids: torch.Tensor,
        document_lengths: Sequence[int],
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the summed loss (fp64 scalar) of the micro-batch; see ``data.collate.MicroBatch`` for the shapes."""
        hidden = self.hidden(input_ids, position_ids, document_lengths, attention_mask)
        return self._head_loss(hidden.flatten(0, 1)[predictors], target_ids)

    def hidden(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        document_lengths: Sequence[int],
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the decoder's last hidden states ``[rows, tokens, width]``.

        Packed rows reach transformers' own backends through restarting positions and no mask at all, from which it
        builds block-diagonal masks; padded rows through a two-dimensional mask.
        """
        boundaries: dict[str, Any] = (
            {"document_lengths": document_lengths} if self._document_attention else {"attention_mask": attention_mask}
        )
        output = self.causal_lm.get_decoder()(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, **boundaries
        )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def _head_loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        head = self.causal_lm.get_output_embeddings()
        chunk = max(1, CHUNK_BYTES // (4 * head.weight.shape[0]))
        device = hidden.device.type
        compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        with torch.autocast(device, enabled=False):
            loss: torch.Tensor = SummedCrossEntropy.apply(  # type: ignore[no-untyped-call]
                hidden, head.weight, head.bias, targets, self._transform, chunk, compute
            )
        return loss

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return this head's logits for all of ``hidden``; for ``verify`` and tests, not for training."""
        head = self.causal_lm.get_output_embeddings()
        return self._transform.forward(F.linear(hidden, head.weight, head.bias).float())

    def verify(self, *, packed: bool, device: torch.device) -> None:
        """Collective where the model is sharded: see the function. A method, so that a strategy can wrap it."""
        verify(self, packed=packed, device=device)


@torch.no_grad()
def verify(model: TrainingModel, *, packed: bool, device: torch.device) -> None:
    """Compare with the model's own forward on two short documents, alone and (if ``packed``) in one row.

    Refuses a model whose head or attention we would compute differently. Costs a forward of a few dozen tokens.
    """
    causal_lm = model.causal_lm
    name = type(causal_lm).__name__
    if type(causal_lm.get_output_embeddings()) is not nn.Linear:
        kind = type(causal_lm.get_output_embeddings()).__name__
        raise ModelError(f"the output head of {name} is a {kind}, not a plain linear layer", where="model.path")
    was_training = causal_lm.training
    causal_lm.eval()
    vocabulary = causal_lm.config.get_text_config().vocab_size
    ids = (torch.arange(sum(PROBE_LENGTHS), device=device)[None] * 7 + 3) % vocabulary
    documents = torch.split(ids, list(PROBE_LENGTHS), dim=1)
    own = [_own_forward(causal_lm, document, model._document_attention) for document in documents]
    states, logits = [each for each, _ in own], [each for _, each in own]
    places = [torch.arange(n, device=device)[None] for n in PROBE_LENGTHS]
    is_half = torch.is_autocast_enabled(device.type)
    tolerance = TOLERANCES[torch.bfloat16 if is_half else causal_lm.get_output_embeddings().weight.dtype]
    ours = [model.logits(each) for each in states]
    _refuse_different(ours, logits, f"the loss head computes other logits than {name} itself", tolerance.head)
    ours = [model.hidden(document, place, (document.shape[1],)) for document, place in zip(documents, places)]
    what = f"with model.attention as it is, {name} computes other states than by itself"
    _refuse_different(ours, states, what, tolerance.states, "model.attention")
    if packed:
        row = model.hidden(ids, torch.cat(places, 1), PROBE_LENGTHS)
        ours = list(torch.split(row, list(PROBE_LENGTHS), dim=1))
        _refuse_different(ours, states, f"packed documents see each other in {name}", tolerance.states, "data.pack")
    causal_lm.train(was_training)


def _own_forward(causal_lm: Any, ids: torch.Tensor, document_attention: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return states and logits of the model's own forward, with transformers' eager attention where ours is in use."""
    chosen, states = causal_lm.config._attn_implementation, []
    if document_attention:
        causal_lm.set_attn_implementation("eager")
    decoder = causal_lm.get_decoder()
    handle = decoder.register_forward_hook(lambda _module, _inputs, output: states.append(output.last_hidden_state))
    try:
        logits: torch.Tensor = causal_lm(input_ids=ids, use_cache=False).logits.float()
    finally:
        handle.remove()
    causal_lm.set_attn_implementation(chosen)
    return states[-1], logits


def _refuse_different(
    ours: Sequence[torch.Tensor],
    own: Sequence[torch.Tensor],
    what: str,
    tolerance: float,
    where: str = "model.path",
) -> None:
    """Compare by the length of the difference: a single value's rounding grows with the depth of a model."""
    error = max(float((a - b).float().norm() / b.float().norm().clamp_min(1e-6)) for a, b in zip(ours, own))
    if not error <= tolerance:
        hints = {"data.pack": "set data.pack=false", "model.attention": "set model.attention=sdpa or eager"}
        hint = hints.get(where, "this model cannot be trained by this version")
        raise ModelError(f"{what}: relative difference {error:.2g}, allowed {tolerance:g}", where=where, hint=hint)
