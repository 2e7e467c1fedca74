"""One update: micro-batches -> summed loss -> backward -> clip -> step. No files, no printing.

The loss of an update is (sum of token losses over the global batch) / (its number of targets). The divisor is global
and known beforehand: it scales each micro-batch's loss before backward, and nobody averages afterwards (laws 1, 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from unisono.dist import World, gather
from unisono.optim import set_rate
from unisono.outcome import UpdateResult, Word
from unisono.precision import Precision
from unisono.strategy import Strategy


class Batch(Protocol):
    """A micro-batch that can put its arguments on a device."""

    def inputs(self, device: torch.device) -> dict[str, object]:
        """Return the arguments of the training model's forward."""


def take_update(
    model: torch.nn.Module,
    micro_batches: Sequence[Batch],
    *,
    num_targets: int,
    strategy: Strategy,
    optimizer: torch.optim.Optimizer,
    precision: Precision,
    world: World,
    rate: float,
    max_grad_norm: float | None,
    word: Callable[[float], Word] = Word.after,
    enter: Callable[[str], None] = lambda phase: None,
) -> UpdateResult:
    """Collective. Take one optimizer update over this rank's micro-batches; ``num_targets`` counts all ranks' targets.

    All ranks decide alike: losses are gathered, and ``word`` with them, which is told how many of backward's seconds
    were no work of this rank; the gradient norm is global. ``enter`` hears what begins: forward, backward (the last one
    exchanges gradients, and a GPU is waited for in it), exchange, optimizer.
    """
    strategy.zero(optimizer)
    set_rate(optimizer, rate)  # now: a strategy may step within backward
    losses = []  # stay on the device: reading each would stall a GPU between micro-batches
    for place, batch in enumerate(micro_batches, 1):
        with strategy.microbatch(last=place == len(micro_batches)):
            enter("forward")
            with precision.autocast():
                loss = model(**batch.inputs(world.device))
            enter("backward")
            strategy.backward(precision.scale(loss / num_targets))
        losses.append(loss.detach())
    total = float(torch.stack(losses).double().sum())
    enter("exchange")
    everyone = gather([total, *word(strategy.exposed_seconds()).values()])
    mean = math.fsum(theirs[0] for theirs in everyone) / num_targets
    bad_ranks = [rank for rank, theirs in enumerate(everyone) if not math.isfinite(theirs[0])]
    precision.unscale(optimizer)
    norm = strategy.clip(max_grad_norm)
    enter("optimizer")
    can_step = math.isfinite(mean) and math.isfinite(norm)
    (precision.step if can_step else precision.skip)(optimizer)
    overflow_has_an_answer = precision.compute == "fp16" and math.isfinite(mean)
    return UpdateResult(
        loss=mean,
        grad_norm=norm,
        stepped=can_step,
        is_sound=can_step or overflow_has_an_answer,
        bad_ranks=bad_ranks,
        words=[Word.of(theirs[1:]) for theirs in everyone],
    )


@torch.no_grad()
def evaluate(model: torch.nn.Module, micro_batches: Sequence[Batch], precision: Precision, world: World) -> float:
    """Return the summed loss over this rank's micro-batches; no gradients, nothing kept."""
    total = 0.0
    for batch in micro_batches:
        with precision.autocast():
            total += float(model(**batch.inputs(world.device)))
    return total
