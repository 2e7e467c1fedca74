"""unisono, as a person runs it: a run file, ``unisono train``, and the numbers that the run leaves behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from job import MAX_GRAD_NORM, SEED, Job, answer


def run_file(job: Job) -> str:
    """Return the run file; JSON is YAML. What is not here is unisono's default."""
    return json.dumps(
        {
            "run": {"name": job.contestant, "output_dir": f"{job.folder}/run", "seed": SEED},
            "model": {"path": job.model},
            "data": {"train": [job.chats], "shuffle": False, "cache_dir": f"{job.folder}/cache"},
            "batch": {"global_size": job.global_size},
            "optim": {
                "lr": job.rate,
                "schedule": "constant",
                "warmup": 0,
                "weight_decay": 0.0,
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


def main() -> None:
    """Run the job that the first argument names, and answer."""
    job = Job.read(sys.argv[1])
    file = Path(job.folder) / "run.yaml"
    file.write_text(run_file(job))
    subprocess.run([Path(sys.executable).with_name("unisono"), "train", file], check=True)
    run = Path(job.folder) / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "kind" not in line]  # of updates
    environment = json.loads((run / "environment.json").read_text())
    answer(
        seconds=[line["seconds"] for line in lines],
        tokens=[line["num_tokens"] for line in lines],
        losses=[line["loss"] for line in lines],
        versions=environment["versions"],
    )


if __name__ == "__main__":
    main()
