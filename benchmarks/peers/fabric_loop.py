"""A loop on Lightning Fabric, as its guide has it: setup, no_backward_sync, backward, clip_gradients."""

from __future__ import annotations

import sys

import torch
from job import MAX_GRAD_NORM, SEED, Job
from lightning_fabric import Fabric
from torch.utils.data import DataLoader
from work import Clock, adamw, collate, finish, load_model


def train(job: Job, fabric: Fabric) -> torch.nn.Module:
    """Make the job's updates, and return the model."""
    model = load_model(job)
    model, optimizer = fabric.setup(model, adamw(model, job))
    loader = fabric.setup_dataloaders(DataLoader(job.samples(), batch_size=job.micro_size, collate_fn=collate))
    batches = iter(loader)
    for _ in range(job.updates):
        for place in range(job.accumulation):
            with fabric.no_backward_sync(model, enabled=place < job.accumulation - 1):
                fabric.backward(model(**next(batches)).loss / job.accumulation)
        fabric.clip_gradients(model, optimizer, max_norm=MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return model.module


def main() -> None:
    """Run the job that the first argument names; rank 0 answers."""
    job = Job.read(sys.argv[1])
    clock = Clock()
    fabric = Fabric(
        accelerator="cpu",
        devices=job.ranks,
        strategy="ddp" if job.ranks > 1 else "auto",
        precision="bf16-mixed" if job.precision == "bf16" else "32-true",
    )
    fabric.launch()
    fabric.seed_everything(SEED)
    model = train(job, fabric)
    if fabric.is_global_zero:
        finish(model, job, clock, ["transformers", "lightning-fabric"])
    fabric.barrier()


if __name__ == "__main__":
    main()
