"""Parameters by formula are those that transformers builds, to the last one."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.errors import ModelError
from unisono.plan.architecture import FAMILIES, architecture_of

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 500,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("mistral", {"head_dim": 32}),
    ("smollm3", {"pad_token_id": 0}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {}),
    ("qwen3", {"head_dim": 16}),
    ("gemma", {}),
    ("gemma2", {}),
    ("gemma3_text", {"head_dim": 16}),
    ("phi3", {"pad_token_id": 0}),
    ("mixtral", {"num_local_experts": 4}),
    ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 96, "num_experts_per_tok": 2}),
]


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_parameters_are_those_of_transformers(family: str, changes: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **(SMALL | changes))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    written = config.to_dict()
    ours = architecture_of(written, where="here")
    assert ours.parameters == sum(parameter.numel() for parameter in model.parameters())
    # of what config.json leaves out, the family's own is assumed: it does so where a value is the default
    short = SMALL | changes | {"model_type": family}
    assert architecture_of(short, where="here").parameters == ours.parameters


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks for it
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"], ["down_proj"]])
def test_adapters_are_those_of_peft(targets: Any) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("llama", **SMALL)
    model = AutoModelForCausalLM.from_config(config)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    assert architecture_of(config.to_dict(), where="here").adapters(4, targets) == trained


def test_published_sizes() -> None:
    """Llama 2 7B has 6,738,415,616 parameters, Qwen2.5 0.5B 494,032,768, Mixtral 8x7B 46,702,792,704."""
    llama = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008}
    qwen = {
        "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True,
    }  # fmt: skip
    mixtral = {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
    }  # fmt: skip
    for family, config, expected in (
        ("llama", llama | {"vocab_size": 32000}, 6_738_415_616),
        ("qwen2", qwen, 494_032_768),
        ("mixtral", mixtral, 46_702_792_704),
    ):
        assert architecture_of(config | {"model_type": family}, where="here").parameters == expected


def test_an_unknown_architecture_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ModelError, match=r"'gpt2'.*llama, mistral") as met:
        architecture_of({"model_type": "gpt2"}, where="models/gpt2")
    assert "models/gpt2" in str(met.value)
    assert {family for family, _ in CASES} == FAMILIES.keys()
