"""A loop of one's own on accelerate, as its guide to gradient accumulation has it: each target the same weight."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from job import MAX_GRAD_NORM, SEED, Job
from torch.utils.data import DataLoader
from work import Clock, adamw, collate, finish, load_model


def train(job: Job, accelerator: Accelerator) -> torch.nn.Module:
    """Make the job's updates, and return the model."""
    model = load_model(job)
    loader = DataLoader(job.samples(), batch_size=job.micro_size, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, adamw(model, job), loader)
    batches = iter(loader)
    for _ in range(job.updates):
        chosen = [next(batches) for _ in range(job.accumulation)]
        num_targets = sum((batch["labels"][:, 1:] != -100).sum() for batch in chosen)
        num_targets = int(accelerator.gather(num_targets).sum())
        for place, batch in enumerate(chosen):
            with nullcontext() if place == job.accumulation - 1 else accelerator.no_sync(model):
                loss = model(**batch, num_items_in_batch=num_targets).loss
                accelerator.backward(loss * accelerator.num_processes)  # DDP takes the mean over processes
        accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.unwrap_model(model)


def main() -> None:
    """Run the job that the first argument names; rank 0 answers."""
    job = Job.read(sys.argv[1])
    set_seed(SEED)
    clock = Clock()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if job.precision == "bf16" else "no")
    model = train(job, accelerator)
    if accelerator.is_main_process:
        finish(model, job, clock, ["transformers", "accelerate"])
    accelerator.end_training()


if __name__ == "__main__":
    main()
