"""The example job: its run files fit as its README says, and run end to end on a small model of the same kind."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.runs import make_data
from support.sizes import LLAMA_2_7B
from support.tiny import save_tiny
from unisono.config.load import load
from unisono.plan.architecture import architecture_of
from unisono.plan.fit import Choice, choices
from unisono.plan.hardware import GIB, find_device
from unisono.plan.memory import host_bytes

EXAMPLE = Path(__file__).parents[2] / "examples/llama2-7b-4x24gb"
SHAPE = architecture_of(LLAMA_2_7B, where="here")


def planned(file: str, *overrides: str, device: str = "rtx-3090", gpus: int = 4) -> list[Choice]:
    """Plan a run file of the example."""
    return choices(load(EXAMPLE / file, list(overrides)).config, SHAPE, find_device(device), gpus)


def as_written(found: list[Choice]) -> Choice:
    """Return the choice that the run file makes: nothing is shared out, recomputed or exchanged besides."""
    return next(each for each in found if not (each.load.share_optimizer or each.load.checkpointing))


def said() -> list[list[str]]:
    """Return the rows of the README's tables."""
    lines = (EXAMPLE / "README.md").read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def numbers(choice: Choice) -> tuple[str, str]:
    """Write memory and speed as the README does."""
    return f"{choice.peak.total / GIB:.1f}", f"{choice.seconds.tokens_per_second:,.0f}"


def test_the_readme_is_what_the_planner_says() -> None:
    rows = {(row[0], row[1]): row for row in said() if len(row) == 5}
    for file in ("lora.yaml", "qlora.yaml"):
        choice, row = as_written(planned(file)), next(r for (name, _), r in rows.items() if name == f"`{file}`")
        assert choice.fits and (row[2], row[4]) == numbers(choice)
    eight, exact = (
        next(each for each in planned("full-sharded.yaml", *overrides) if not each.load.cpu_offload)
        for overrides in ((), ("optim.name=adamw",))
    )
    offloaded = planned("full-exact.yaml")[0]
    row = rows[("`full-exact.yaml`", "all weights, fsdp2, AdamW in fp32, parts in host memory, up to 1,024 tokens")]
    assert offloaded.fits and (row[2], row[4]) == numbers(offloaded)
    in_all = f"{4 * host_bytes(offloaded.load) / GIB:.0f} GiB of host memory"
    assert in_all in (EXAMPLE / "README.md").read_text(encoding="utf-8")
    its, others = (r for (name, _), r in rows.items() if name == "`full-sharded.yaml`")
    assert eight.fits and (its[2], its[4]) == numbers(eight)
    assert not exact.fits and others[2] == numbers(exact)[0]
    assert f"{(exact.peak.total - exact.room_bytes) / GIB:.1f} too much" in others[3]
    half = next(e for e in planned("full-sharded.yaml", "optim.name=adamw_bf16") if not e.load.cpu_offload)
    assert not half.fits and f"takes {numbers(half)[0]} GiB" in (EXAMPLE / "README.md").read_text(encoding="utf-8")
    v100 = planned(
        "lora.yaml", "strategy.name=auto", "precision.compute=fp16", "precision.weights=fp32", device="v100-32", gpus=1
    )[0]
    table = {row[0]: row[1] for row in said() if len(row) == 3}
    assert v100.fits and v100.load.checkpointing
    assert (table["GiB a card"], table["tokens/s, planned"]) == numbers(v100)


@pytest.mark.parametrize(
    ("file", "ranks"),
    [
        ("qlora.yaml", 2),
        ("full-sharded.yaml", 2),
        ("full-exact.yaml", 2),
        *(pytest.param(file, 4, marks=pytest.mark.slow) for file in ("lora.yaml", "qlora.yaml", "full-sharded.yaml")),
    ],
)
def test_the_run_files_run_on_a_small_llama(tmp_path: Path, file: str, ranks: int) -> None:
    model = save_tiny(
        tmp_path / "model", hidden_size=256, intermediate_size=688, num_hidden_layers=8, vocab_size=32000,
        num_attention_heads=8, num_key_value_heads=8,
    )  # fmt: skip
    overrides = [
        f"model.path={model}",
        f"data.train=[{make_data(tmp_path, 40)}]",
        f"data.cache_dir={tmp_path / 'cache'}",
        "data.max_length=200",
        f"run.output_dir={tmp_path / 'run'}",
        "batch.global_size=8",
        "length.epochs=null",
        "length.updates=2",
        f"launch.ranks={ranks}",
    ]
    command = [sys.executable, "-c", "from unisono.cli import main; main()", "train", str(EXAMPLE / file), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall(r"update \d/2  loss (\d+\.\d+)", done.stdout)]
    assert len(losses) == 2 and losses[1] < losses[0] + 0.5
    assert any((tmp_path / "run/model").glob("*.safetensors"))
