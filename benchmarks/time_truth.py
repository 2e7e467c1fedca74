"""Compare the planner's seconds with those of real updates, on this machine, right after calibrating it.

python benchmarks/time_truth.py [--only TEXT] [--machine FILE]   (make time-truth)

Each setting takes real updates through the lines that a run takes, in the environment of a run's ranks (threads,
allocator); the median counts. Calibrating and measuring are done in one go, because a machine that is shared, or that
clocks down, is another machine an hour later. Code 1 if a setting is further off than is promised.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from plan_truth import SHAPE, Setting, model_folder, prepare_updates
from unisono.plan.architecture import architecture_of
from unisono.plan.machine import Measured, read_measured
from unisono.plan.measured import seconds_measured
from unisono.plan.memory import Load
from unisono.plan.time import Seconds

WORST = 0.15  # what the planner promises
WARM_UP, UPDATES = 2, 9
SECONDS = "seconds: "  # how a rank's answer begins
_WIDE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4}
_LARGE = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 32000,
}  # fmt: skip
_TIED = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
         "num_hidden_layers": 6, "vocab_size": 49152, "tie_word_embeddings": True}  # fmt: skip


def settings() -> list[Setting]:
    """Sizes, formats, adapters, checkpointing, one and two ranks, small and large micro-batches."""
    short, one, few = (150,) * 8, (600,), (64,) * 2
    two = {"strategy": "ddp", "ranks": 2}
    return [
        Setting("full fp32", short),
        Setting("full bf16", short, "bf16"),
        Setting("full bf16, small micro-batch", few, "bf16"),
        Setting("full fp32 wide, one document", one, shape=_WIDE),
        Setting("lora bf16 wide", short, "bf16", lora=8, shape=_WIDE),
        Setting("lora fp32 wide", one, lora=16, shape=_WIDE),
        Setting("full bf16 wide, checkpointing", short, "bf16", recompute="full", shape=_WIDE),
        Setting("full fp32, accumulation", few * 2, num_micro=4),
        Setting("full bf16 large", short, "bf16", shape=_LARGE),
        Setting("lora bf16 large, checkpointing", short, "bf16", lora=16, recompute="full", shape=_LARGE),
        Setting("full bf16 tied, long", (1400,), "bf16", shape=_TIED),
        Setting("ddp full fp32", short, **two),
        Setting("ddp full bf16", short, "bf16", **two),
        Setting("ddp full bf16 wide, accumulation", short, "bf16", num_micro=3, shape=_WIDE, **two),
        Setting("ddp lora bf16 wide", short, "bf16", lora=8, shape=_WIDE, **two),
        Setting("ddp full bf16 large", short, "bf16", shape=_LARGE, **two),
        Setting("ddp full fp32 wide, checkpointing", one, recompute="full", shape=_WIDE, **two),
    ]


def measure(setting: Setting, folder: Path) -> float:
    """Return the median seconds of an update on this rank, which has joined the others."""
    update = prepare_updates(setting, folder)
    found = []
    for _ in range(WARM_UP + UPDATES):
        start = time.perf_counter()
        update()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found[WARM_UP:])


def run(settings: Sequence[Setting], where: Path) -> list[float]:
    """Measure settings of one number of ranks in processes of their own; returns rank 0's answers."""
    from unisono.bench.calibrate import environment_of_ranks

    world = settings[0].ranks
    described = json.dumps([[asdict(each), str(model_folder(SHAPE | each.shape, where))] for each in settings])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = []
    for rank in range(world):
        place = {
            "RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        environment = environment_of_ranks(world) | {key: str(value) for key, value in place.items()}
        command = [sys.executable, "-W", "ignore", __file__, "--rank", described]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    answers = [rank.communicate(timeout=900)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"a rank failed: {answers}")
    return [float(line.removeprefix(SECONDS)) for line in answers[0].splitlines() if line.startswith(SECONDS)]


def predicted(setting: Setting, measured: Measured) -> Seconds:
    """Ask the planner."""
    rates = measured.for_ranks(setting.ranks)
    assert rates is not None, "one and two ranks are calibrated"
    load = Load(
        architecture_of({"model_type": "llama", **SHAPE, **setting.shape}, where="here"),
        setting.documents,
        setting.targets,
        is_half=setting.compute == "bf16",
        lora_rank=setting.lora,
        recompute=setting.recompute,
        strategy=setting.strategy,
        ranks=setting.ranks,
        accumulates=setting.num_micro > 1,
        on_gpu=measured.on_gpu,
    )
    return seconds_measured(load, rates, num_micro=setting.num_micro)


def main() -> int:
    """Calibrate, measure, print the table; 1 if the planner is further off than it promises."""
    from unisono.bench.calibrate import calibrate

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="settings whose name holds this")
    parser.add_argument("--machine", type=Path, help="a calibration that is there already")
    args = parser.parse_args()
    chosen = [setting for setting in settings() if args.only in setting.name]
    numbers = sorted({setting.ranks for setting in chosen})
    with tempfile.TemporaryDirectory(prefix="time-truth-") as scratch:
        file = args.machine or Path(scratch) / "machine.json"
        measured = read_measured(file) or calibrate(numbers, print, file=file)
        plans = [predicted(setting, measured) for setting in chosen]
        seconds: dict[str, float] = {}
        for number in numbers:
            group = [setting for setting in chosen if setting.ranks == number]
            found = run(group, Path(scratch))
            seconds |= {setting.name: each for setting, each in zip(group, found, strict=True)}
    errors = []
    print(f"{'':38} {'measured':>9} {'planned':>9}        products attention elementwise overhead exchange optimizer")
    for setting, plan in zip(chosen, plans, strict=True):
        real = seconds[setting.name]
        errors.append(plan.total / real - 1)
        parts = (plan.products, plan.attention, plan.elementwise, plan.overhead, plan.exchange, plan.optimizer)
        print(
            f"{setting.name:38} {real * 1e3:6.0f} ms {plan.total * 1e3:6.0f} ms {errors[-1]:+6.1%} "
            + " ".join(f"{each * 1e3:9.1f}" for each in parts),
            flush=True,
        )
    sizes = sorted(map(abs, errors))
    print(f"{len(sizes)} settings: {statistics.median(sizes):.1%} off in the median, {sizes[-1]:.1%} at worst")
    return int(sizes[-1] > WORST)


def _as_rank(described: str) -> None:
    from unisono import dist
    from unisono.worker import leave

    dist.join(dist.find_world(), 60)
    for given, folder in json.loads(described):
        setting = Setting(**{**given, "documents": tuple(given["documents"])})
        print(f"{SECONDS}{measure(setting, Path(folder))}", flush=True)
    leave(0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        _as_rank(*sys.argv[2:])
    sys.exit(main())
