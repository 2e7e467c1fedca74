"""The loop of a DDP tutorial in plain PyTorch: the oracle. Nothing of unisono is imported here."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, AutoTokenizer


def encode(tokenizer: Any, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    """Tokens and labels of one question with its answer: the answer and its end marker are learned."""
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    answer = messages[1]["content"] + tokenizer.eos_token
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text.startswith(prompt + answer)
    pieces = [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in (prompt, answer)]
    rest = tokenizer(text[len(prompt + answer) :], add_special_tokens=False)["input_ids"]
    return pieces[0] + pieces[1] + rest, [-100] * len(pieces[0]) + pieces[1] + [-100] * len(rest)


def collate(samples: list[tuple[list[int], list[int]]], pad: int) -> dict[str, torch.Tensor]:
    """One padded batch."""
    width = max(len(ids) for ids, _ in samples)
    ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in samples])
    labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in samples])
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in samples])
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def rate(step: int, total: int, warmup: int) -> float:
    """The factor of the learning rate in step 0, 1, ...: linear warm-up, then half a cosine."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


def train_plainly(
    rank: int, world: int, folder: Path, data: Path, batches: list[list[int]], lr: float, warmup: int
) -> list[dict[str, float]]:
    """Train over ``batches`` of line numbers; every rank takes its stride of each. Returns loss, norm, rate by step."""
    dist.init_process_group("gloo", init_method="env://")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    samples = [encode(tokenizer, json.loads(line)["messages"]) for line in data.read_text().splitlines()]
    model = DistributedDataParallel(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, len(batches), warmup))
    steps = []
    for numbers in batches:
        batch = collate([samples[number] for number in numbers[rank::world]], tokenizer.pad_token_id)
        labels = batch.pop("labels")[:, 1:]
        logits = model(**batch).logits[:, :-1]
        summed = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        totals = torch.stack([summed.detach().double(), (labels != -100).sum().double()])
        dist.all_reduce(totals)
        optimizer.zero_grad()
        (summed / totals[1] * world).backward()  # DDP takes the mean over ranks: undone
        norm = clip_grad_norm_(model.parameters(), 1.0)
        used = optimizer.param_groups[0]["lr"]
        optimizer.step()
        schedule.step()
        steps.append({"loss": float(totals[0] / totals[1]), "grad_norm": float(norm), "lr": used})
    dist.barrier()
    return steps
