"""What is planned: bytes that move the right way, figures of others, choices that fit, and plain errors."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.sizes import LLAMA_2_7B
from unisono.config.load import load
from unisono.plan.architecture import architecture_of
from unisono.plan.fit import EVERY_WAY, as_object, choices
from unisono.plan.hardware import DEVICES, GIB, find_device
from unisono.plan.memory import CUDA_FRAGMENTATION, Load, base_bytes, host_bytes, moments, peak
from unisono.plan.time import forward_flops, seconds_of_update

SHAPE = architecture_of(LLAMA_2_7B, where="here")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FULL = Load(SHAPE, (1024,), 1024, is_half=True, on_gpu=True)
LORA = replace(FULL, lora_rank=16, has_half_weights=True)


@st.composite
def loads(draw: st.DrawFn) -> Load:
    """Any load of any strategy."""
    lora = draw(st.one_of(st.none(), st.integers(1, 64)))
    documents = tuple(draw(st.lists(st.integers(1, 2000), min_size=1, max_size=6)))
    strategy = draw(st.sampled_from(["single", "ddp", "fsdp2"]))
    return Load(
        SHAPE,
        documents,
        draw(st.integers(1, sum(documents))),
        is_half=draw(st.booleans()),
        lora_rank=lora,
        recompute=draw(st.sampled_from(["none", "selective", "full", "offload"])),
        moment_bytes=draw(st.sampled_from([0.0, 2.03, 4.0, 8.0])),
        strategy=strategy,
        ranks=1 if strategy == "single" else draw(st.integers(2, 64)),
        accumulates=draw(st.booleans()),
        exchanges_always=strategy == "fsdp2" and draw(st.booleans()),
        on_gpu=draw(st.booleans()),
    )


@settings(max_examples=200)
@given(load=loads())
def test_bytes_move_the_right_way(load: Load) -> None:
    assert all(size >= 0 for moment in moments(load) for size in moment.parts.values())
    size = peak(load).total
    longer = replace(load, documents=(*load.documents, 64), targets=load.targets + 64)
    assert peak(longer).total >= size
    none, selective, full, offload = (peak(replace(load, recompute=way)).total for way in EVERY_WAY)
    assert offload <= full <= min(none, selective)
    assert peak(replace(load, moment_bytes=load.moment_bytes + 1)).total > size
    assert peak(replace(load, accumulates=True)).total >= size
    if load.strategy == "ddp":
        assert peak(replace(load, share_optimizer=True, accumulates=False)).total <= size
    if load.strategy == "fsdp2" and load.lora_rank is None:
        assert peak(replace(load, ranks=2 * load.ranks)).total < size
    if load.strategy != "ddp":
        assert peak(replace(load, in_backward=True)).total <= size
    if load.strategy == "fsdp2":
        assert peak(replace(load, keeps_gathered=True)).total >= size
        offloaded = replace(load, cpu_offload=True)
        assert peak(offloaded).total < size if load.on_gpu else peak(offloaded) == peak(load)
        assert host_bytes(offloaded) - host_bytes(load) == load.on_gpu * (
            (base_bytes(load) + load.trained_bytes + load.moments_bytes) // load.parts
        )


def test_gradients_that_are_let_go_are_those_of_the_model() -> None:
    """Of a full 7B with moments of 8 bits: 4 + 2 bytes a parameter remain of 10, and one matrix's gradient."""
    kept = replace(FULL, documents=(64,), targets=8, moment_bytes=2.0, is_half=False)
    saved = peak(kept).total - peak(replace(kept, in_backward=True)).total
    assert 0.9 * 4 * SHAPE.parameters < saved / (1 + CUDA_FRAGMENTATION) < 4 * SHAPE.parameters


def test_what_passes_through_host_memory_takes_time(tmp_path: Path) -> None:
    device = find_device("rtx-3090")
    sharded = replace(FULL, strategy="fsdp2", ranks=4, recompute="full")
    offloaded = replace(sharded, cpu_offload=True)
    here, there = (seconds_of_update(each, device, num_micro=3) for each in (sharded, offloaded))
    assert here.host == 0.0 and there.optimizer == 0.0
    # 3 micro-batches x 2 gathers of a quarter of 27 GB, and the gradients once: 47 GB by PCIe; 5 x 27 + ... on the CPU
    assert there.host == pytest.approx(47.2e9 / 25e9 + 47.2e9 / 20e9, rel=0.01)
    inputs = seconds_of_update(replace(sharded, recompute="offload"), device, num_micro=1).host
    assert inputs == pytest.approx(2 * 1024 * 32 * 4096 * 4 / 25e9)
    assert seconds_of_update(replace(offloaded, on_gpu=False), device, num_micro=1).host == 0.0


def test_the_state_of_a_full_7b_is_sixteen_bytes_a_parameter_on_every_card() -> None:
    """What a tutorial of plain DDP on 24 GB cards leaves out."""
    parts = next(
        moment for moment in moments(replace(FULL, strategy="ddp", ranks=4)) if moment.name == "optimizer"
    ).parts
    assert parts["weights"] + parts["gradients"] + parts["optimizer"] == 16 * SHAPE.parameters
    assert 16 * SHAPE.parameters > 100 * GIB


def test_what_the_planner_knows_of_the_code_is_so() -> None:
    """It may not import torch, and so repeats these."""
    from unisono import loss
    from unisono.model import products, quantize, recompute
    from unisono.optim import lean
    from unisono.plan import fit, memory

    assert (memory.CHUNK_BYTES, memory.GROUP_BYTES) == (loss.CHUNK_BYTES, loss.GROUP_BYTES)
    assert products.LONGEST == memory.SHORT and memory.SCALE_BYTES == 4 / quantize.BLOCK
    assert fit.BLOCK == lean.BLOCK and memory.FEWEST_TERMS == recompute.FEWEST_TERMS


def test_published_lora_7b_on_an_a10g() -> None:
    """LitGPT's config hub: rank 32 on query and value, bf16 weights, length 512, micro-batch 2: 19.77 GB."""
    load = replace(LORA, documents=(512, 512), targets=1024, lora_rank=32, lora_targets=["q_proj", "v_proj"])
    assert peak(load).total / 1e9 == pytest.approx(19.77, rel=0.10)


def test_products_are_six_a_parameter_and_token() -> None:
    """Kaplan et al. 2020, but for embeddings, which are looked up, and attention."""
    one = replace(FULL, documents=(1,), targets=1)
    assert forward_flops(one) == pytest.approx(2 * (SHAPE.parameters - SHAPE.embedding), rel=1e-3)
    device = find_device("a100-80")
    full, adapters = (seconds_of_update(each, device, num_micro=1) for each in (FULL, LORA))
    assert full.products == pytest.approx(1.5 * adapters.products)
    again = seconds_of_update(replace(FULL, recompute="full"), device, num_micro=1)
    assert again.products == pytest.approx(full.products * 4 / 3) and again.flops == full.flops
    assert 0.3 < full.mfu(device) < 0.5


def test_a_save_copies_each_value_once() -> None:
    assert host_bytes(replace(FULL, strategy="ddp", ranks=4)) == pytest.approx(12 * SHAPE.parameters / 4, abs=4)
    packed = base_bytes(replace(LORA, is_packed=True)) - LORA.trained_bytes
    assert packed == pytest.approx(SHAPE.layers * SHAPE.matrices * 0.5625 + 2 * 262_410_240, rel=1e-3)


def write_run(folder: Path, **sections: Any) -> Path:
    """Write a run file on a Llama 2 7B of which there is the config.json alone, and data that is not there."""
    (folder / "llama").mkdir(exist_ok=True)
    (folder / "llama/config.json").write_text(json.dumps(LLAMA_2_7B))
    run: dict[str, Any] = {
        "run": {"output_dir": str(folder / "run")},
        "model": {"path": str(folder / "llama")},
        "data": {"train": ["data.jsonl"], "max_length": 1024},
        "batch": {"global_size": 64},
        "length": {"updates": 100},
    }
    for section, values in sections.items():
        run[section] = run[section] | values if section in run else values
    file = folder / "run.yaml"
    file.write_text(json.dumps(run))
    return file


def test_choices_are_ordered_and_say_how_to_be_made(tmp_path: Path) -> None:
    config = load(write_run(tmp_path, model={"lora": {}}, precision={"weights": "bf16"}), []).config
    found = choices(config, SHAPE, find_device("rtx-3090"), 4)
    fits = [each.fits for each in found]
    assert fits == sorted(fits, reverse=True) and fits[0] and not fits[-1]
    speeds = [each.seconds.tokens_per_second for each in found if each.fits]
    assert speeds == sorted(speeds, reverse=True)
    assert {each.load.strategy for each in found} == {"ddp", "fsdp2"}
    for each in found:
        load(tmp_path / "run.yaml", each.overrides)
        assert each.seconds.tokens == each.load.tokens * each.num_micro * 4
    assert json.loads(json.dumps(as_object(found, find_device("rtx-3090"))))["choices"][0]["fits"]


def test_full_7b_with_exact_moments_fits_cards_of_24_gb_from_host_memory_only(tmp_path: Path) -> None:
    config = load(write_run(tmp_path), []).config
    found = choices(config, SHAPE, find_device("rtx-3090"), 4)
    assert {each.load.cpu_offload for each in found if each.fits} == {True}
    assert "strategy.cpu_offload=true" in found[0].overrides
    for refused in ("precision.compute=fp16", "strategy.name=ddp"):
        config = load(write_run(tmp_path), [refused]).config
        assert not any(each.load.cpu_offload for each in choices(config, SHAPE, find_device("rtx-3090"), 4))
    inside = load(write_run(tmp_path), ["optim={in_backward: true, max_grad_norm: null}"]).config
    assert {(each.load.strategy, each.load.cpu_offload) for each in choices(inside, SHAPE, find_device("a10g"), 4)} == {
        ("fsdp2", False)
    }
    config = load(write_run(tmp_path), []).config
    assert any(each.fits for each in choices(config, SHAPE, find_device("h100"), 8))


def unisono(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command, and tell if it has imported torch."""
    code = (
        "import sys; from unisono.cli import main\n"
        f"sys.argv = ['unisono', *{list(arguments)!r}]\n"
        "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_the_command_answers_at_once_without_torch_or_weights(tmp_path: Path) -> None:
    file = str(write_run(tmp_path))
    begin = time.monotonic()
    answer = unisono("plan", file, "strategy.name=ddp", "--gpus", "4", "--device", "rtx-3090")
    assert time.monotonic() - begin < 5, "0.3 s on idle cores"
    assert answer.returncode == 1, answer.stderr
    for said in ("6,738,415,616 parameters", "does not fit", "model.lora={}", "GiB too much"):
        assert said in answer.stdout
    fits = unisono("plan", file, "model.lora={}", "precision.weights=bf16", "--device", "a10g", "--gpus", "4", "--json")
    assert fits.returncode == 0 and json.loads(fits.stdout)["choices"][0]["overrides"]
    lora = ("model.lora={}", "precision.weights=bf16")
    told = unisono("plan", file, *lora, "--device", "rtx-3090", "--gpus", "2", "--price", "0.5").stdout
    assert "100 updates: " in told and "kWh" in told and "GiB of disk for 3 checkpoints" in told
    assert " at 0.5 a device and hour" in told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "a100"], "did you mean a100-40 or a100-80?"),
        (["--device", "rtx3090"], "did you mean rtx-3090?"),
        (["data.max_length=auto"], "data.max_length is auto"),
        (["model.path=nowhere"], "nowhere is not a folder with a config.json"),
    ],
)
def test_mistakes_are_told_with_exit_code_2(tmp_path: Path, arguments: list[str], said: str) -> None:
    answer = unisono("plan", str(write_run(tmp_path)), *arguments)
    assert answer.returncode == 2 and said in answer.stderr, answer.stderr
    assert "Traceback" not in answer.stderr


# what is sold, in GB as the vendor counts them (GDDR and HBM: powers of two, but for H200 and B200)
SOLD_GIB = {
    "rtx-3090": 24, "rtx-4090": 24, "rtx-5090": 32, "a10g": 24, "l4": 24, "l40s": 48, "v100-16": 16, "v100-32": 32,
    "a100-40": 40, "a100-80": 80, "h100": 80, "h200": 141, "b200": 180, "mi300x": 192,
}  # fmt: skip


def test_devices_have_sources_and_less_memory_than_is_sold() -> None:
    """A slip of a figure (memory of another size, sparse for dense, both directions of a link for one) is told."""
    assert DEVICES.keys() == SOLD_GIB.keys()
    for name, device in DEVICES.items():
        assert len(device.source) > 20, name
        assert 0.9 * SOLD_GIB[name] < device.memory_gib < SOLD_GIB[name], name
        assert device.fp32_tflops < device.half_tflops < 35 * device.fp32_tflops, name
        # a wafer's memory feeds its multipliers: 60 to 500 half-precision operations a byte in all of them
        assert 60 < 1000 * device.half_tflops / device.memory_gb_per_second < 500, name
        assert device.link_gb_per_second < device.memory_gb_per_second / 5, name
    figures = [(d.memory_gib, d.half_tflops, d.memory_gb_per_second) for d in DEVICES.values()]
    assert len(set(figures)) == len(figures)


def test_the_kept_measurements_are_met() -> None:
    """What ``make plan-truth`` measured in steps of this code; it measures again what is planned here."""
    rows = json.loads((BENCHMARKS / "plan-truth.json").read_text())
    errors = sorted(abs(row["predicted_bytes"] / row["measured_bytes"] - 1) for row in rows)
    assert len(rows) >= 40 and errors[len(errors) // 2] <= 0.05 and errors[-1] <= 0.10
    now = subprocess.run(
        [sys.executable, str(BENCHMARKS / "plan_truth.py"), "--plan"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(now.stdout) == {row["setting"]: row["predicted_bytes"] for row in rows}


def test_a_setting_measured_now() -> None:
    command = [sys.executable, "-W", "ignore", str(BENCHMARKS / "plan_truth.py"), "--only", "lora bf16, checkpointing"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "1 settings" in told
