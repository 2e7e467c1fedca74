"""What contestants written with torch share: the batch, the clock, and the loss that all are judged by."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import torch
from job import BETAS, EPS, LORA_ALPHA, LORA_RANK, Job, Sample, answer
from torch.optim.optimizer import register_optimizer_step_post_hook

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Clock:
    """Takes the time whenever an optimizer has made its step, whoever calls it."""

    def __init__(self) -> None:
        self._times = [time.time()]
        register_optimizer_step_post_hook(lambda *_: self._times.append(time.time()))

    @property
    def seconds(self) -> list[float]:
        """Seconds of each update; the first has all that came before it, and is not to be counted."""
        return [after - before for before, after in pairwise(self._times)]

    @property
    def first_at(self) -> float:
        """When the first update was done."""
        return self._times[1]


def collate(samples: Sequence[Sample], padding: int = 0) -> dict[str, torch.Tensor]:
    """Pad to the longest, on the right: three tensors ``[samples, tokens]``."""
    width = max(len(ids) for ids, _ in samples)
    short = [width - len(ids) for ids, _ in samples]
    return {
        "input_ids": torch.tensor([ids + [padding] * n for (ids, _), n in zip(samples, short)]),
        "labels": torch.tensor([labels + [-100] * n for (_, labels), n in zip(samples, short)]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * n for (ids, _), n in zip(samples, short)]),
    }


def load_model(job: Job) -> Any:
    """Load the model with transformers, and adapters with peft where they are what is trained."""
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if job.weights == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype, attn_implementation="sdpa")
    model.config.use_cache = False
    if job.method == "lora":
        from peft import get_peft_model

        model = get_peft_model(model, lora_config())
    return model.train()


def lora_config() -> Any:
    """Return peft's description of the adapters."""
    from peft import LoraConfig

    return LoraConfig(
        r=LORA_RANK, lora_alpha=LORA_ALPHA, lora_dropout=0.0, target_modules=list(LINEAR), task_type="CAUSAL_LM"
    )


def adamw(model: torch.nn.Module, job: Job) -> torch.optim.Optimizer:
    """Return the optimizer of those who build their own."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=job.rate, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True)


def autocast(job: Job) -> torch.autocast:
    """Return the context of the forward pass."""
    return torch.autocast("cpu", torch.bfloat16, enabled=job.precision == "bf16")


@torch.no_grad()
def held_out_loss(logits_of: Callable[[torch.Tensor], torch.Tensor], job: Job) -> float:
    """Return the loss a target of the held-out samples, each by itself: what all are compared by.

    ``logits_of``: from ids ``[1, tokens]`` to logits ``[1, tokens, words]``.
    """
    total, targets = 0.0, 0
    for ids, labels in job.held_out():
        wanted = torch.tensor(labels[1:])
        with autocast(job):
            logits = logits_of(torch.tensor([ids]))[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits.float(), wanted, reduction="sum"))
        targets += int((wanted != -100).sum())
    return total / targets


def finish(model: Any, job: Job, clock: Clock, packages: Sequence[str], tokens: Sequence[int] | None = None) -> None:
    """Judge the trained model of transformers, and answer. ``tokens``: of each update, where the order is not kept."""
    model.eval()
    seconds = clock.seconds
    loss = held_out_loss(lambda ids: model(input_ids=ids).logits, job)
    versions = {name: version(name) for name in ("torch", *packages)}
    answer(seconds=seconds, first_at=clock.first_at, tokens=tokens or job.tokens(), loss=loss, versions=versions)
