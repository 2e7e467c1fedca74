"""What a run does about keys that are left open: for made-up devices, by the planner's answer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from support.sizes import LLAMA_2_7B
from unisono.config.load import load
from unisono.errors import ConfigError
from unisono.plan.architecture import architecture_of
from unisono.plan.auto import CPU_TOKENS, GPU_TOKENS, Decision, decide
from unisono.plan.hardware import GIB, Device, find_device
from unisono.plan.here import cpu

SHAPE = architecture_of({**LLAMA_2_7B, "num_hidden_layers": 8}, where="here")  # 1.9 billion parameters
GPU = find_device("a100-80")


def gpu(gib: float) -> Device:
    """Return a GPU with other memory."""
    return replace(GPU, memory_gib=gib)


@pytest.fixture
def decided(tmp_path: Path) -> object:
    """Decide for a run file with overrides."""
    file = tmp_path / "run.yaml"
    run = {
        "run": {"output_dir": "x"},
        "model": {"path": "starter"},
        "data": {"train": [str(file)]},
        "batch": {"global_size": 64},
        "length": {"updates": 10},
    }
    file.write_text(json.dumps(run))

    def decide_for(device: Device, ranks: int, *overrides: str, longest: int = 1024) -> Decision:
        loaded = load(file, overrides)
        decision = decide(loaded.config, loaded.origins, SHAPE, device, ranks, longest)
        load(file, [*overrides, *decision.overrides])  # the run file takes them
        return decision

    return decide_for


def test_the_usual_way_is_kept_where_it_fits(decided) -> None:  # type: ignore[no-untyped-def]
    decision = decided(gpu(160), 4)
    assert decision.values == {} and decision.line.startswith("auto: ddp, micro-batches of 8 x 1,024 tokens: ")
    assert decided(cpu(160 * GIB, has_bf16=True), 2) == Decision({})
    assert decided(cpu(160 * GIB, has_bf16=True), 1) == Decision({})


def test_small_memory_takes_fsdp2_and_says_why(decided) -> None:  # type: ignore[no-untyped-def]
    decision = decided(gpu(24), 4)
    assert decision.values["strategy.name"] == "fsdp2"
    assert "ddp" in decision.line and "does not fit (" in decision.line and "of 24.0 GiB); fsdp2" in decision.line
    on_cpu = decided(cpu(24 * GIB, has_bf16=True), 2)
    assert on_cpu.values["strategy.name"] == "fsdp2" and "does not fit" in on_cpu.line


def test_checkpointing_only_where_it_is_needed(decided) -> None:  # type: ignore[no-untyped-def]
    sizes = (160, 60, 24, 16, 12)
    found = [decided(gpu(gib), 4).values for gib in sizes]
    assert "model.activation_checkpointing" not in found[0] | found[1]
    assert found[-1]["model.activation_checkpointing"] in ("selective", "full")
    tokens = [values.get("batch.micro_tokens", GPU_TOKENS) for values in found]
    assert all(1024 <= each <= GPU_TOKENS for each in tokens)


def test_host_memory_is_taken_where_nothing_else_fits(decided) -> None:  # type: ignore[no-untyped-def]
    decision = decided(gpu(8), 4)
    assert decision.values["strategy.cpu_offload"] and decision.values["strategy.name"] == "fsdp2"
    assert "its parts in host memory" in decision.line
    assert "strategy.cpu_offload" not in decided(gpu(24), 4).values
    with pytest.raises(ConfigError):
        decided(gpu(8), 4, "strategy.cpu_offload=false")
    named = decided(gpu(160), 4, "strategy={name: fsdp2, cpu_offload: true}")
    assert "strategy.cpu_offload" not in named.values and "its parts in host memory" in named.line


def test_what_is_named_is_kept(decided) -> None:  # type: ignore[no-untyped-def]
    for named in (
        "strategy.name=fsdp2",
        "batch.micro_tokens=2048",
        "batch.micro_size=1",
        "model.activation_checkpointing=false",
        "strategy.share_optimizer=false",
        "strategy.exchange=update",
        "strategy={name: fsdp2, reshard_after_forward: true}",
    ):
        for gib in (160, 24):
            assert named.partition("=")[0] not in decided(gpu(gib), 4, named).values
    assert "model.activation_checkpointing" not in decided(gpu(24), 4, "model.activation_checkpointing=false").values


def test_nothing_that_fits_is_refused_with_advice(decided) -> None:  # type: ignore[no-untyped-def]
    for device in (gpu(2), cpu(2 * GIB, has_bf16=True)):
        with pytest.raises(ConfigError, match=r"no way to run this fits: the smallest .* of 2\.0 GiB") as refused:
            decided(device, 2)
        assert refused.value.exit_code == 2 and "model.lora={}" in refused.value.hint
        with pytest.raises(ConfigError):
            decided(device, 2, "strategy.name=ddp")


def test_a_person_who_named_everything_is_only_warned(decided) -> None:  # type: ignore[no-untyped-def]
    everything = ("strategy.name=ddp", "batch.micro_tokens=2048")
    warned = decided(gpu(4), 2, *everything)
    assert warned.values == {} and warned.line.startswith("warning: ") and "of 4.0 GiB" in warned.line
    assert decided(gpu(160), 2, *everything) == Decision({})


def test_what_the_run_file_refuses_is_not_chosen(decided) -> None:  # type: ignore[no-untyped-def]
    """Adapters over weights in 4 bits cannot be cut into parts."""
    packed = ("model.quantize=nf4", "model.lora={}")
    decision = decided(gpu(7), 4, *packed)
    assert decision.values and decision.values.get("strategy.name", "ddp") == "ddp"


def test_a_micro_batch_is_no_larger_than_a_ranks_share_of_an_update(decided) -> None:  # type: ignore[no-untyped-def]
    assert "4 x 100 tokens" in decided(gpu(160), 16, longest=100).line


def test_longer_samples_have_micro_batches_of_their_own(decided) -> None:  # type: ignore[no-untyped-def]
    assert "1 x 10,000 tokens" in decided(gpu(1000), 2, longest=10_000).line


def test_values_are_put_into_the_run_file() -> None:
    decision = Decision({"strategy.name": "fsdp2", "model.activation_checkpointing": "full", "batch.micro_tokens": 64})
    assert decision.overrides == (
        "strategy.name=fsdp2",
        "model.activation_checkpointing=full",
        "batch.micro_tokens=64",
    )


def test_sizes_are_those_of_the_run() -> None:
    from unisono import build

    assert (GPU_TOKENS, CPU_TOKENS) == (build.GPU_MICRO_TOKENS, build.CPU_MICRO_TOKENS)
