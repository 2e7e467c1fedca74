"""Models without formulas: traced without memory. Those with formulas are held against them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unisono.config.schema import LoraSection, ModelSection
from unisono.errors import ModelError
from unisono.model.trace import Trace, trace
from unisono.plan.architecture import architecture_of, traced, unknown
from unisono.plan.memory import Load, kept_bytes, peak

SMALL = {
    "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 704, "vocab_size": 1000, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def write_config(folder: Path, family: str, **changes: Any) -> dict[str, Any]:
    """Write a configuration as transformers would, and return it."""
    from transformers import AutoConfig

    config: dict[str, Any] = AutoConfig.for_model(family, **(SMALL | changes)).to_dict()
    (folder / "config.json").write_text(json.dumps(config))
    return config


def trace_small(folder: Path, lora: LoraSection | None = None, **formats: str) -> Trace:
    section = ModelSection(path=str(folder), lora=lora)
    return trace(folder, section, **({"weights": "float32", "compute": "bfloat16"} | formats))


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "qwen3",
        "gemma2",
        "phi3",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("qwen2", "gemma3_text")),
    ],
)
def test_a_trace_agrees_with_the_formulas(tmp_path: Path, family: str) -> None:
    """Parameters to the last one; what is kept, and the whole peak, within 3 %."""
    shape = architecture_of(write_config(tmp_path, family), where="here")
    runs: list[tuple[dict[str, str], LoraSection | None, dict[str, Any]]] = [
        ({}, None, {"is_half": True}),
        ({"compute": "float32"}, None, {}),
        (
            {"weights": "bfloat16"},
            LoraSection(rank=8),
            {"is_half": True, "has_half_weights": True, "lora_rank": 8},
        ),
        (
            {"weights": "bfloat16"},
            LoraSection(rank=8, dropout=0.1),
            {"is_half": True, "has_half_weights": True, "lora_rank": 8, "has_dropout": True},
        ),
    ]
    for formats, lora, settings in runs:
        found = trace_small(tmp_path, lora, **formats)
        load = Load(shape, (512, 300), 400, on_gpu=True, **settings)
        ours = replace(load, architecture=traced(vars(found), name=family))
        assert (found.parameters, found.block, found.layers) == (shape.parameters, shape.block, shape.layers)
        assert ours.trained == load.trained and found.is_tied == shape.is_tied
        assert kept_bytes(ours) == pytest.approx(kept_bytes(load), rel=0.03), (formats, lora)
        assert found.kept_by_pair == pytest.approx(0, abs=1e-6)
        for recompute in ("none", "full"):
            pair = [peak(replace(each, recompute=recompute)).total for each in (ours, load)]
            assert pair[0] == pytest.approx(pair[1], rel=0.03)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mixtral", {"num_local_experts": 4}),
        ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 96, "num_experts_per_tok": 2}),
    ],
)
def test_experts_keep_what_the_formulas_say(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    shape = architecture_of(write_config(tmp_path, family, **changes), where="here")
    for lora in (None, LoraSection(rank=8)):
        found = trace_small(tmp_path, lora, weights="bfloat16")
        rank = None if lora is None else 8
        load = Load(shape, (512,), 400, is_half=True, has_half_weights=True, lora_rank=rank, on_gpu=True)
        ours = replace(load, architecture=traced(vars(found), name=family))
        assert kept_bytes(ours) == pytest.approx(kept_bytes(load), rel=0.03), lora


def test_an_attention_of_its_own_keeps_a_matrix(tmp_path: Path) -> None:
    """Eager attention: probabilities, in fp32 and cast, for each pair of tokens and each head."""
    write_config(tmp_path, "olmo2")
    found = trace(
        tmp_path, ModelSection(path=str(tmp_path), attention="eager"), weights="float32", compute="bfloat16"
    )  # fmt: skip
    assert found.kept_by_pair >= 8 * 2
    shape = traced(vars(found), name="olmo2")
    short, long = (kept_bytes_of(Load(shape, documents, 8, is_half=True)) for documents in ((64,) * 8, (512,)))
    assert long - short == pytest.approx(8 * found.kept_by_pair * (512**2 - 8 * 64**2), rel=1e-6)


def kept_bytes_of(load: Load) -> int:
    """Return the activations at the end of a forward."""
    from unisono.plan.memory import moments

    return moments(load)[0].parts["activations"]


def test_what_cannot_be_built_or_run_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobodys", "auto_map": {"AutoConfig": "x.y"}}))
    with pytest.raises(ModelError, match="neither by formula nor"):
        trace_small(tmp_path)
    write_config(tmp_path, "falcon")
    with pytest.raises(ModelError, match=r"model\.attention=eager"):
        trace_small(tmp_path)
    assert unknown(tmp_path) == "falcon"


def test_the_command_traces_what_it_has_no_formulas_for(tmp_path: Path) -> None:
    """GPT-2 of 124 M parameters, whose linear layers are no nn.Linear."""
    from transformers import GPT2Config

    config = GPT2Config().to_dict() | {"architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = {
        "run": {"output_dir": str(tmp_path / "run")},
        "model": {"path": str(tmp_path)},
        "data": {"train": ["data.jsonl"], "max_length": 1024},
        "batch": {"global_size": 16},
        "length": {"updates": 10},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    command = [sys.executable, "-c", "from unisono.cli import main; main()", "plan", str(tmp_path / "run.yaml")]
    answer = subprocess.run([*command, "--gpus", "2"], capture_output=True, text=True, timeout=100, check=False)
    assert answer.returncode == 0, answer.stderr
    assert "124,439,808 parameters, 124,439,808 trained" in answer.stdout
    assert answer.stderr == "no formulas for gpt2: traced with transformers, which takes some seconds\n"
    packed = subprocess.run(
        [*command, "model.quantize=nf4", "model.lora={}"], capture_output=True, text=True, timeout=100, check=False
    )
    assert packed.returncode == 2 and "in full and with adapters only" in packed.stderr
