"""Letting a model answer in the middle of training: the question that a sample is, and no trace in the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.tiny import save_tiny
from support.updates import MemoryStore
from unisono.config.schema import LoraSection, ModelSection
from unisono.data.question import first_questions, question
from unisono.data.template import load_tokenizer
from unisono.greedy import end_tokens, greedy
from unisono.model.answer import answer, answering
from unisono.model.load import base_model, load_model
from unisono.precision import Precision

CPU = torch.device("cpu")
PROMPT = [256, *b"user\nhello", 257, 10, 256, *b"assistant\n"]


def store_of(*masks: str) -> MemoryStore:
    """One sample a mask, a target where it has an x; the ids count from 10."""
    flags = [np.array([mark == "x" for mark in mask]) for mask in masks]
    return MemoryStore([np.arange(10, 10 + len(mask), dtype=np.int32) for mask in masks], flags)


@pytest.mark.parametrize(
    ("mask", "prompt", "expected"),
    [
        ("..xx", [10, 11], [12, 13]),
        (".x..xx.", [10, 11, 12, 13], [14, 15]),
        (".xxx", [10], [11, 12, 13]),
        (".x.x", [10, 11, 12], [13]),
    ],
)
def test_a_question_is_what_comes_before_the_last_answer(mask: str, prompt: list[int], expected: list[int]) -> None:
    asked = question(store_of("....", mask), 1)
    assert (asked.prompt.tolist(), asked.expected.tolist(), asked.record) == (prompt, expected, 1)


def test_samples_without_a_target_are_not_asked() -> None:
    store = store_of("....", "..x.", "....", ".xxx", ".x")
    assert first_questions(store, 2) == [1, 3]
    assert first_questions(store, 9) == [1, 3, 4]
    assert first_questions(store_of(*["..."] * 70_000, ".x", "..", ".x"), 2) == [70_000, 70_002]


def ask(model: Any, tokenizer: Any, compute: str = "fp32", num_tokens: int = 12) -> tuple[list[int], list[int]]:
    """Return the answer and what was said about the number of its tokens."""
    counted: list[int] = []
    with answering(model), Precision(compute, CPU).autocast():
        ids = answer(
            model,
            PROMPT,
            settings=greedy(model, tokenizer, num_tokens),
            ends=end_tokens(model, tokenizer),
            device=CPU,
            on_token=counted.append,
        )
    return ids, counted


def plain(model: Any, compute: str, num_tokens: int = 12) -> list[int]:
    """Answer without a cache: the whole sequence anew for every token."""
    ids = list(PROMPT)
    model.eval().set_attn_implementation("sdpa")
    for _ in range(num_tokens):
        with torch.no_grad(), Precision(compute, CPU).autocast():
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].float().argmax()))
    found = ids[len(PROMPT) :]
    return found[: found.index(257)] if 257 in found else found


def state_of(saved: torch.nn.Module) -> dict[str, Any]:
    """Everything of a model that answering might change."""
    causal_lm = base_model(saved)
    return {
        "attention": {id(m): m.config._attn_implementation for m in causal_lm.modules() if "config" in vars(m)},
        "training": [module.training for module in saved.modules()],
        "weights": [tensor.clone() for tensor in (*saved.parameters(), *saved.buffers())],
        "settings": causal_lm.generation_config.to_dict(),
        "config": causal_lm.config.to_dict(),
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in saved.modules()],
        "generator": torch.get_rng_state().tolist(),
    }


def assert_same_state(ours: dict[str, Any], other: dict[str, Any]) -> None:
    weights = zip(ours.pop("weights"), other.pop("weights"), strict=True)
    assert all(torch.equal(a, b) for a, b in weights)
    assert ours == other


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")  # of transformers, by load_model
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("section", [{}, {"attention": "eager"}, {"activation_checkpointing": "full"}, {"lora": True}])
def test_the_answer_is_the_models_and_leaves_no_trace(tiny: Path, section: dict[str, Any], compute: str) -> None:
    lora = {"lora": LoraSection(rank=4, dropout=0.5)} if "lora" in section else {}
    settings = ModelSection(path=str(tiny), **(section | lora))
    saved = load_model(settings, tiny, weights=torch.float32, seed=0).train()
    for name, parameter in saved.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model, tokenizer = base_model(saved), load_tokenizer(tiny, trust_remote_code=False)
    first = next(saved.modules())
    list(model.modules())[5].eval()  # a part that somebody froze stays so
    before = state_of(saved)
    ids, counted = ask(model, tokenizer, compute)
    assert_same_state(state_of(saved), before)
    assert first.training and len(ids) > 2 and counted[: len(ids) + 1] == list(range(len(ids) + 1))
    assert ids == plain(model, compute)
    if lora:
        untrained = load_model(ModelSection(path=str(tiny)), tiny, weights=torch.float32, seed=0)
        assert ids != ask(untrained, tokenizer, compute)[0], "the adapters take part"


def interrupted(model: Any) -> None:
    """Leave in the middle of answering."""
    with answering(model):
        assert not model.training and model.config._attn_implementation == "sdpa"
        raise KeyboardInterrupt


def test_an_interrupted_answer_leaves_no_trace_either(tiny: Path) -> None:
    saved = load_model(ModelSection(path=str(tiny)), tiny, weights=torch.float32, seed=0).train()
    before = state_of(saved)
    with pytest.raises(KeyboardInterrupt):
        interrupted(saved)
    assert_same_state(state_of(saved), before)


def test_soft_capped_attention_answers_as_it_was_trained(tmp_path: Path) -> None:
    """SDPA has no soft cap: such a model answers with eager attention, and so with its own numbers."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    save_tiny(tmp_path)
    config = Gemma2Config(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        attn_logit_softcapping=0.5,
        initializer_range=0.5,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    model: Any = load_model(ModelSection(path=str(tmp_path)), tmp_path, weights=torch.float32, seed=0)
    with answering(model):
        assert model.config._attn_implementation == "eager"
    assert model.config._attn_implementation == "document"
