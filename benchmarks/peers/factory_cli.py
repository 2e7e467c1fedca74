"""LLaMA-Factory: what ``llamafactory-cli train`` starts on each process, on data that is token ids already.

Its package imports torchaudio, whatever it trains. On PyPI that is built for CUDA, and does not load beside a torch for
CPUs: a stand-in takes its place, as no sound is trained here.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from datasets import Dataset, DatasetDict
from job import BETAS, EPS, LORA_ALPHA, LORA_RANK, MAX_GRAD_NORM, SEED, Job
from work import Clock, finish


def settings(job: Job, data: Path) -> dict[str, Any]:
    """Return its run file; what is not here is its default."""
    lora = {
        "lora_rank": LORA_RANK,
        "lora_alpha": LORA_ALPHA,
        "lora_dropout": 0.0,
        "lora_target": "all",
    }
    return {
        "model_name_or_path": job.model,
        "stage": "sft",
        "do_train": True,
        "finetuning_type": job.method,
        **(lora if job.method == "lora" else {}),
        "tokenized_path": str(data),
        "template": "empty",  # the data is token ids already
        "dataset": "none",
        "output_dir": f"{job.folder}/out",
        "max_steps": job.updates,
        "per_device_train_batch_size": job.micro_size,
        "gradient_accumulation_steps": job.accumulation,
        "disable_shuffling": True,
        "flash_attn": "sdpa",
        "disable_gradient_checkpointing": True,
        "use_cpu": True,
        "bf16": job.precision == "bf16",
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
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "ddp_find_unused_parameters": False,
    }


def stand_in_for_torchaudio() -> None:
    """Let ``import torchaudio`` succeed; whatever is asked of it fails."""
    module = ModuleType("torchaudio")
    module.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
    sys.modules["torchaudio"] = module


def tokenized(job: Job) -> Path:
    """Return the folder with the samples as its loader reads them, of this process."""
    folder = Path(job.folder) / f"tokens-{os.environ['RANK']}"
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels} for ids, labels in job.samples()]
    DatasetDict({"train": Dataset.from_list(rows)}).save_to_disk(str(folder))
    return folder


def main() -> None:
    """Run the job that the first argument names; rank 0 answers."""
    job = Job.read(sys.argv[1])
    clock = Clock()
    stand_in_for_torchaudio()
    from llamafactory.train.tuner import run_exp

    run_exp(settings(job, tokenized(job)))
    if os.environ["RANK"] == "0":
        from ours import load

        finish(load(job, Path(job.folder) / "out"), job, clock, ["transformers", "accelerate", "llamafactory"])
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
