"""Updates of models so small that they compute next to nothing: what is left is Python, dispatch, hooks and waiting."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from unisono.config.schema import LoraSection, OptimSection, StrategySection
from unisono.dist import World
from unisono.loss import TrainingModel
from unisono.model import attention
from unisono.model.load import add_adapters, base_model
from unisono.optim import build_optimizer
from unisono.plan.measured import PROBE, PROBE_DOCUMENTS
from unisono.precision import DTYPES, Precision
from unisono.resume import trainable
from unisono.step import take_update
from unisono.strategy import choose


class Batch:
    """A packed row of small documents, all of them targets."""

    def inputs(self, device: torch.device) -> dict[str, object]:
        """Return the arguments of forward."""
        tokens = sum(PROBE_DOCUMENTS)
        ids = torch.arange(tokens, device=device) % PROBE["vocab_size"]
        return {
            "input_ids": ids[None],
            "position_ids": torch.cat([torch.arange(length, device=device) for length in PROBE_DOCUMENTS])[None],
            "predictors": torch.arange(tokens, device=device),
            "target_ids": ids,
            "document_lengths": PROBE_DOCUMENTS,
        }


def probe(layers: int, rank: int | None, compute: str, world: World) -> Callable[[], object]:
    """Collective. Build a model of so many layers, with adapters of ``rank``; returns what takes an update of it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    attention.register()
    config = LlamaConfig.from_dict({**PROBE, "num_hidden_layers": layers})
    config._attn_implementation = attention.NAME
    model = LlamaForCausalLM(config)
    adapted = model if rank is None else add_adapters(model, LoraSection(rank=rank), 0)
    adapted.to(world.device)
    training = TrainingModel(base_model(adapted), document_attention=True)
    strategy = choose(StrategySection(), world.size, DTYPES[compute])
    wrapped = strategy.shard(training).train()
    optimizer = build_optimizer(OptimSection(), trainable(training))
    strategy.bind(optimizer)
    return partial(
        take_update,
        wrapped,
        [Batch()],
        num_targets=sum(PROBE_DOCUMENTS) * world.size,
        strategy=strategy,
        optimizer=optimizer,
        precision=Precision(compute, world.device),
        world=world,
        rate=1e-4,
        max_grad_norm=1.0,
    )
