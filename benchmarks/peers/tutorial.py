"""The loop of a tutorial: padded batches, DistributedSampler, DDP, ``loss / accumulation``. torch and transformers.

It is given what costs a tutorial nothing: the fused AdamW, and no exchange of gradients before the last micro-batch.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from job import MAX_GRAD_NORM, SEED, Job, answer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer


def read_samples(job: Job, tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """Return ids and labels of each conversation; -100 on the prompt, which has no loss."""
    samples = []
    for line in Path(job.chats).read_text().splitlines():
        messages = json.loads(line)["messages"]
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        assert ids[: len(prompt)] == prompt, "the prompt's tokens are not the beginning of the conversation's"
        samples.append((ids, [-100] * len(prompt) + ids[len(prompt) :]))
    return samples


def collate(samples: list[tuple[list[int], list[int]]], padding: int) -> dict[str, torch.Tensor]:
    """Pad to the longest on the right."""
    width = max(len(ids) for ids, _ in samples)
    short = [width - len(ids) for ids, _ in samples]
    return {
        "input_ids": torch.tensor([ids + [padding] * n for (ids, _), n in zip(samples, short)]),
        "labels": torch.tensor([labels + [-100] * n for (_, labels), n in zip(samples, short)]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * n for (ids, _), n in zip(samples, short)]),
    }


def train(job: Job) -> tuple[list[float], list[int], list[float]]:
    """Return seconds, tokens and loss of every update."""
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    model.config.use_cache = False
    model = DistributedDataParallel(model.train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.rate, weight_decay=0.0, fused=True)
    samples = read_samples(job, tokenizer)
    loader = DataLoader(
        samples,
        batch_size=job.micro_size,
        sampler=DistributedSampler(samples, shuffle=False),
        collate_fn=lambda chosen: collate(chosen, tokenizer.pad_token_id),
        drop_last=True,
    )
    batches = iter(loader)
    half = job.precision == "bf16"
    seconds, tokens, losses = [], [], []
    dist.barrier()
    before = time.perf_counter()
    for _ in range(job.updates):
        counts = torch.zeros(3, dtype=torch.float64)  # summed loss, targets, tokens
        for place in range(job.accumulation):
            batch = next(batches)
            last = place == job.accumulation - 1
            with nullcontext() if last else model.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=half):
                    loss = model(**batch).loss
                (loss / job.accumulation).backward()
            targets = int((batch["labels"][:, 1:] != -100).sum())
            counts += torch.tensor([loss.item() * targets, targets, int(batch["attention_mask"].sum())])
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(counts)
        now = time.perf_counter()
        seconds.append(now - before)
        tokens.append(int(counts[2]))
        losses.append(float(counts[0] / counts[1]))
        before = now
    return seconds, tokens, losses


def main() -> None:
    """Run the job that the first argument names; rank 0 answers."""
    torch.manual_seed(SEED)
    dist.init_process_group("gloo")
    seconds, tokens, losses = train(Job.read(sys.argv[1]))
    if dist.get_rank() == 0:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        answer(seconds=seconds, tokens=tokens, losses=losses, versions=versions)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
