"""unisono, as a person runs it: a run file, ``unisono train``, and the numbers that the run leaves behind."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from job import BETAS, EPS, LORA_ALPHA, LORA_RANK, MAX_GRAD_NORM, SEED, Job, answer


def run_file(job: Job) -> str:
    """Return the run file; JSON is YAML. What is not here is unisono's default."""
    lora = {"rank": LORA_RANK, "alpha": LORA_ALPHA, "dropout": 0.0, "targets": "all-linear"}
    return json.dumps(
        {
            "run": {"name": job.contestant, "output_dir": f"{job.folder}/run", "seed": SEED},
            "model": {"path": job.model, **({"lora": lora} if job.method == "lora" else {})},
            "data": {"train": [job.chats], "shuffle": False, "cache_dir": f"{job.folder}/cache"},
            "batch": {"global_size": job.global_size},
            "optim": {
                "lr": job.rate,
                "schedule": "constant",
                "warmup": 0,
                "weight_decay": 0.0,
                "betas": BETAS,
                "eps": EPS,
                "max_grad_norm": MAX_GRAD_NORM,
            },
            "length": {"updates": job.updates},
            "precision": {"compute": job.precision},
            "checkpoint": {"every": job.updates},
            "launch": {
                "ranks": job.ranks,
                "max_restarts": 0,
                "allocator": "auto" if job.allocator else "none",
            },
        },
        indent=2,
    )


def train(file: Path) -> list[float]:
    """Run it, and return when it began and when it said that each update was done, as ``time.time()``.

    Its own seconds are not asked: peers are timed from one step to the next, with all that lies between.
    """
    command = [Path(sys.executable).with_name("unisono"), "train", file]
    times = [time.time()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="")
            if re.match(r"update \d+/", line):
                times.append(time.time())
    if process.returncode:
        raise SystemExit(process.returncode)
    return times


def load(job: Job, folder: Path) -> Any:
    """Return the model that the run has left, as transformers and peft load it."""
    from transformers import AutoModelForCausalLM

    if job.method == "full":
        return AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    from peft import PeftModel

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(job.model, dtype="float32"), folder)


def main() -> None:
    """Run the job that the first argument names, and answer."""
    job = Job.read(sys.argv[1])
    file = Path(job.folder) / "run.yaml"
    file.write_text(run_file(job))
    times = train(file)
    run = Path(job.folder) / "run"
    environment = json.loads((run / "environment.json").read_text())
    from work import held_out_loss  # torch, only after the run: it is no part of it

    model = load(job, run / "model").eval()
    answer(
        seconds=[after - before for before, after in pairwise(times)],
        first_at=times[1],
        tokens=job.tokens(),  # without the newline behind the end marker, which unisono reads, too
        loss=held_out_loss(lambda ids: model(input_ids=ids).logits, job),
        versions=environment["versions"],
    )


if __name__ == "__main__":
    main()
