"""TRL's SFTTrainer on token ids: padded, padded and balanced, or packed (best-fit decreasing).

It is given its best settings for a CPU, those of ``hf_trainer.py``. Its loss is the chunked one, which never has the
logits of all tokens at once (``chunked_nll`` once, the default since TRL 1.x).
"""

from __future__ import annotations

import sys

from datasets import Dataset
from hf_trainer import counted, settings
from job import Job
from trl import SFTConfig, SFTTrainer
from work import Clock, finish, load_model


def main() -> None:
    """Run the job that the first argument names; rank 0 answers."""
    job = Job.read(sys.argv[1])
    clock = Clock()
    packed = job.sampling == "packed"
    trainer = SFTTrainer(
        model=load_model(job),
        args=SFTConfig(
            **settings(job),
            packing=packed,
            packing_strategy="bfd",
            max_length=job.row_tokens if packed else None,
        ),
        train_dataset=Dataset.from_list([{"input_ids": ids, "labels": labels} for ids, labels in job.samples()]),
    )
    trainer.train()
    if trainer.is_world_process_zero():
        model = trainer.accelerator.unwrap_model(trainer.model)
        finish(model, job, clock, ["transformers", "accelerate", "trl"], counted(trainer, "num_tokens"))


if __name__ == "__main__":
    main()
