"""transformers' Trainer on token ids: padded, in order or with samples of like length together.

It is given its best settings for a CPU: SDPA, the fused AdamW, no gradient checkpointing, an exchange an update.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

from job import BETAS, EPS, MAX_GRAD_NORM, SEED, Job
from transformers import Trainer, TrainingArguments
from work import Clock, collate, finish, load_model


def settings(job: Job) -> dict[str, Any]:
    """Return what Trainer and TRL's SFTTrainer are told alike; what is not here is their default."""
    return {
        "output_dir": f"{job.folder}/out",
        "max_steps": job.updates,
        "per_device_train_batch_size": 1 if job.sampling == "packed" else job.micro_size,
        "gradient_accumulation_steps": job.accumulation,
        "train_sampling_strategy": "sequential" if job.sampling == "packed" else job.sampling,
        "use_cpu": True,
        "bf16": job.precision == "bf16",
        "gradient_checkpointing": False,
        "learning_rate": job.rate,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "adam_epsilon": EPS,
        "max_grad_norm": MAX_GRAD_NORM,
        "optim": "adamw_torch_fused",
        "seed": SEED,
        "logging_steps": 1,
        "logging_strategy": "steps",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "ddp_find_unused_parameters": False,
    }


def counted(trainer: Trainer, key: str) -> list[int]:
    """Return each update's tokens by what the trainer has logged under ``key``, a running sum."""
    so_far = [0, *(round(line[key]) for line in trainer.state.log_history if key in line and "loss" in line)]
    return [after - before for before, after in pairwise(so_far)]


def main() -> None:
    """Run the job that the first argument names; rank 0 answers."""
    job = Job.read(sys.argv[1])
    clock = Clock()
    trainer = Trainer(
        model=load_model(job),
        args=TrainingArguments(
            **settings(job), remove_unused_columns=False, include_num_input_tokens_seen="non_padding"
        ),
        train_dataset=[{"input_ids": ids, "labels": labels} for ids, labels in job.samples()],
        data_collator=lambda rows: collate([(row["input_ids"], row["labels"]) for row in rows]),
    )
    trainer.train()
    if trainer.is_world_process_zero():
        model = trainer.accelerator.unwrap_model(trainer.model)
        finish(model, job, clock, ["transformers", "accelerate"], counted(trainer, "num_input_tokens_seen"))


if __name__ == "__main__":
    main()
