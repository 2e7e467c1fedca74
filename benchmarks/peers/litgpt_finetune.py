"""LitGPT: what ``litgpt finetune_full`` and ``litgpt finetune_lora`` run, with a data module of token ids.

Neither has a constant rate nor clipping; both are given them, so that the updates are the others'. More than one device
means FSDP to it.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from job import BETAS, EPS, LORA_ALPHA, LORA_RANK, MAX_GRAD_NORM, SEED, Job, Sample, answer
from litgpt.args import EvalArgs, TrainArgs
from litgpt.data import DataModule
from litgpt.finetune import full, lora
from litgpt.prompts import Default
from litgpt.scripts.convert_hf_checkpoint import convert_hf_checkpoint
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from work import Clock, collate, held_out_loss

NAME = "SmolLM2-135M-Instruct"


class Tokens(DataModule):
    """The job's samples, as LitGPT's own data modules give theirs."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.prompt_style = Default()
        self._job = job

    def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int | None = None, **_: Any) -> None:
        """Take the micro-batch."""
        self._micro_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the samples in order."""
        return self._loader(self._job.samples())

    def val_dataloader(self) -> DataLoader[Any]:
        """Return one sample: it validates whether one likes it or not."""
        return self._loader(self._job.held_out()[:1])

    def _loader(self, samples: list[Sample]) -> DataLoader[Any]:
        rows: Any = [{"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)} for ids, labels in samples]
        return DataLoader(rows, batch_size=self._micro_size, collate_fn=_collate)


def _collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    batch: dict[str, Any] = collate([(row["input_ids"].tolist(), row["labels"].tolist()) for row in rows])
    counts = batch.pop("attention_mask").sum(1, keepdim=True)
    return {**batch, "token_counts": {"raw": counts, "raw_plus_prompt_template": counts}}


def checkpoint(job: Job) -> Path:
    """Return the folder with the weights as LitGPT wants them, of this process."""
    folder = Path(job.folder) / f"weights-{os.environ['RANK']}" / NAME
    folder.mkdir(parents=True)
    for file in Path(job.model).iterdir():
        (folder / file.name).symlink_to(file)
    convert_hf_checkpoint(folder, model_name=NAME)
    return folder


def settings(job: Job) -> dict[str, Any]:
    """Return the arguments that both commands share."""
    optimizer = {"lr": job.rate, "betas": BETAS, "eps": EPS, "weight_decay": 0.0, "fused": True}
    return {
        "checkpoint_dir": checkpoint(job),
        "out_dir": Path(job.folder) / "out",
        "precision": "bf16-mixed" if job.precision == "bf16" else "32-true",
        "devices": job.ranks,
        "data": Tokens(job),
        "train": TrainArgs(
            save_interval=None,
            log_interval=1,
            global_batch_size=job.global_size,
            micro_batch_size=job.micro_size,
            lr_warmup_steps=1,
            epochs=2,
            max_steps=job.updates,
        ),
        "eval": EvalArgs(interval=10**6, max_new_tokens=1, max_iters=1, final_validation=False),
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": optimizer},
        "seed": SEED,
    }


def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Clip before the step, over all parameters."""
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], MAX_GRAD_NORM)


def main() -> None:
    """Run the job that the first argument names, and answer."""
    job = Job.read(sys.argv[1])
    clock = Clock()
    register_optimizer_step_pre_hook(clip)
    command = full if job.method == "full" else lora
    command.get_lr_scheduler = lambda optimizer, **_: torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    models: list[torch.nn.Module] = []
    model_class = command.GPT

    def remember(config: Any) -> torch.nn.Module:
        models.append(model_class(config))
        return models[0]

    command.GPT = remember
    lora.merge_lora = lambda **_: None  # reads the arguments of the command line, and comes after the training
    parts = ("query", "key", "value", "projection", "mlp")
    adapters: dict[str, Any] = {f"lora_{part}": True for part in parts}
    adapters |= {"lora_r": LORA_RANK, "lora_alpha": LORA_ALPHA, "lora_dropout": 0.0}
    command.setup(**settings(job), **(adapters if job.method == "lora" else {}))
    model: Any = models[0].eval()
    model.max_seq_length = max(len(ids) for ids, _ in job.held_out())
    answer(
        seconds=clock.seconds,
        first_at=clock.first_at,
        tokens=job.tokens(),
        loss=held_out_loss(model, job),
        versions={name: version(name) for name in ("torch", "litgpt", "lightning")},
    )


if __name__ == "__main__":
    main()
