"""TRL's SFTTrainer on prompt-completion records: padded, padded and balanced, or packed (best-fit decreasing).

It is given its best settings for a CPU: no gradient checkpointing (its default), SDPA, the fused AdamW.
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from typing import Any

import accelerate
import torch
import transformers
import trl
from datasets import load_dataset
from job import MAX_GRAD_NORM, SEED, Job, answer
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer


class Clock(TrainerCallback):
    """Takes the time of every update, from the end of the one before."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._before = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start."""
        self._before = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Take the time of a finished update."""
        now = time.perf_counter()
        self.seconds.append(now - self._before)
        self._before = now


def settings(job: Job) -> SFTConfig:
    """Return the trainer's settings; a packed micro-batch is one row on each rank, and there is one per update."""
    return SFTConfig(
        output_dir=f"{job.folder}/run",
        max_steps=job.updates,
        per_device_train_batch_size=1 if job.packed else job.micro_size,
        gradient_accumulation_steps=1 if job.packed else job.accumulation,
        packing=job.packed,
        packing_strategy="bfd",
        max_length=job.row_tokens if job.packed else None,
        completion_only_loss=True,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        use_cpu=True,
        bf16=job.precision == "bf16",
        gradient_checkpointing=False,
        learning_rate=job.rate,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=MAX_GRAD_NORM,
        optim="adamw_torch_fused",
        train_sampling_strategy="batch_rebalance" if job.balanced else "sequential",
        seed=SEED,
        logging_steps=1,
        logging_strategy="steps",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )


def main() -> None:
    """Run the job that the first argument names; rank 0 answers."""
    job = Job.read(sys.argv[1])
    clock = Clock()
    trainer = SFTTrainer(
        model=job.model,
        args=settings(job),
        train_dataset=load_dataset("json", data_files=job.prompts, split="train", cache_dir=f"{job.folder}/cache"),
        callbacks=[clock],
    )
    trainer.train()
    if not trainer.is_world_process_zero():
        return
    lines = [line for line in trainer.state.log_history if "num_tokens" in line]
    so_far = [0, *(round(line["num_tokens"]) for line in lines)]
    answer(
        seconds=clock.seconds,
        tokens=[after - before for before, after in pairwise(so_far)],
        losses=[line["loss"] for line in lines],
        versions={m.__name__: m.__version__ for m in (torch, transformers, trl, accelerate)},
    )


if __name__ == "__main__":
    main()
