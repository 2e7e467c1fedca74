"""The loop of a tutorial: padded batches, DistributedSampler, DDP, ``loss / accumulation``. torch and transformers.

It is given what costs a tutorial nothing: the fused AdamW, and no exchange of gradients before the last micro-batch.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from job import MAX_GRAD_NORM, SEED, Job
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from work import Clock, adamw, autocast, collate, finish, load_model


def train(job: Job) -> torch.nn.Module:
    """Make the job's updates, and return the model."""
    model = DistributedDataParallel(load_model(job))
    optimizer = adamw(model, job)
    samples = job.samples()
    loader = DataLoader(
        samples,
        batch_size=job.micro_size,
        sampler=DistributedSampler(samples, shuffle=False),
        collate_fn=collate,
        drop_last=True,
    )
    batches = iter(loader)
    for _ in range(job.updates):
        for place in range(job.accumulation):
            with nullcontext() if place == job.accumulation - 1 else model.no_sync():
                with autocast(job):
                    loss = model(**next(batches)).loss
                (loss / job.accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model.module


def main() -> None:
    """Run the job that the first argument names; rank 0 answers."""
    torch.manual_seed(SEED)
    dist.init_process_group("gloo")
    job = Job.read(sys.argv[1])
    clock = Clock()
    model = train(job)
    if dist.get_rank() == 0:
        finish(model, job, clock, ["transformers"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
