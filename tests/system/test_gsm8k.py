"""The main job on real data: the starter model learns from GSM8K on two processes, by the command a person types."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.runs import read_lines, updates_of

ROOT = Path(__file__).parents[2]
PROBLEMS = Path(os.environ.get("UNISONO_GSM8K") or ROOT.parent / "shared/data/gsm8k_train.jsonl")
NUM_TRAIN, NUM_VALIDATION, NUM_UPDATES = 90, 6, 30


def make_files(folder: Path) -> None:
    """Write the shortest problems as prompt and completion: real text, and little of it, for a CPU."""
    problems = read_lines(PROBLEMS)
    problems.sort(key=lambda problem: len(problem["question"]) + len(problem["answer"]))
    pairs = [{"prompt": problem["question"], "completion": problem["answer"]} for problem in problems]
    step = (NUM_TRAIN + NUM_VALIDATION) // NUM_VALIDATION
    chosen = {"validation": pairs[: step * NUM_VALIDATION : step]}
    chosen["train"] = [pair for pair in pairs if pair not in chosen["validation"]][:NUM_TRAIN]
    for name, part in chosen.items():
        text = "".join(json.dumps(pair) + "\n" for pair in part)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


@pytest.mark.timeout(1800)
@pytest.mark.skipif(not PROBLEMS.is_file(), reason=f"GSM8K is not at {PROBLEMS} (or set UNISONO_GSM8K to its file)")
def test_the_validation_loss_falls(tmp_path: Path) -> None:
    make_files(tmp_path)
    run_file = tmp_path / "run.yaml"
    values = {
        "run": {"output_dir": str(tmp_path / "run")},
        "model": {"path": "starter"},
        "data": {
            "train": [str(tmp_path / "train.jsonl")],
            "validation": [str(tmp_path / "validation.jsonl")],
            "max_length": 128,
            "cache_dir": str(tmp_path / "cache"),
        },
        "batch": {"global_size": 3},
        "optim": {"lr": 5e-5, "warmup": 3},
        "length": {"updates": NUM_UPDATES},
        "validate": {"every": 10},
        "launch": {"ranks": 2, "max_restarts": 0},
    }
    run_file.write_text(json.dumps(values), encoding="utf-8")
    command = [str(Path(sys.executable).with_name("unisono")), "train", str(run_file)]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    updates = updates_of(tmp_path / "run")
    assert [line["update"] for line in updates] == list(range(1, NUM_UPDATES + 1))
    losses = [line["loss"] for line in read_lines(tmp_path / "run/metrics.jsonl") if line.get("kind") == "validation"]
    assert len(losses) == NUM_UPDATES // 10
    assert losses[-1] < losses[0] - 0.02, losses
    assert min(losses) > 0.1, "so little cannot be learned from so few samples"
    assert (tmp_path / "run/model/model.safetensors").is_file()
