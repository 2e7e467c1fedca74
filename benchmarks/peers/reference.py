"""What the others are judged by: one process, a sample at a time, each token of the global batch the same weight."""

from __future__ import annotations

import sys
from importlib.metadata import version

import torch
from job import MAX_GRAD_NORM, SEED, Job, answer
from work import Clock, adamw, autocast, held_out_loss, load_model


def main() -> None:
    """Run the job that the first argument names, and answer."""
    torch.manual_seed(SEED)
    job = Job.read(sys.argv[1])
    model = load_model(job)
    before = held_out_loss(lambda ids: model(input_ids=ids).logits, job)
    clock = Clock()
    optimizer = adamw(model, job)
    samples = job.samples()
    for update in range(job.updates):
        chosen = samples[update * job.global_size : (update + 1) * job.global_size]
        num_targets = sum(label != -100 for _, labels in chosen for label in labels[1:])
        for ids, labels in chosen:
            with autocast(job):
                logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits.float(), torch.tensor(labels[1:]), reduction="sum")
            (loss / num_targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    answer(
        seconds=clock.seconds,
        first_at=clock.first_at,
        tokens=job.tokens(),
        loss=held_out_loss(lambda ids: model(input_ids=ids).logits, job),
        loss_before=before,
        versions={name: version(name) for name in ("torch", "transformers")},
    )


if __name__ == "__main__":
    main()
