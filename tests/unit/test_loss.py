"""The loss head: equal to the model's own forward, never a full matrix of logits, or refused by name (B50)."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.nn import functional as F

from unisono.errors import ModelError
from unisono.loss import LogitTransform, SummedCrossEntropy, TrainingModel, verify

SMALL: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}


def build(kind: str, **config: Any) -> Any:
    """Build a small model of a transformers family with document attention."""
    import transformers

    from unisono.model import attention

    attention.register()
    torch.manual_seed(0)
    settings = getattr(transformers, f"{kind}Config")(**(SMALL | config))
    settings._attn_implementation = attention.NAME
    return getattr(transformers, f"{kind}ForCausalLM")(settings)


def sum_loss(hidden: Any, weight: Any, bias: Any, targets: Any, transform: LogitTransform, chunk: int) -> torch.Tensor:
    return SummedCrossEntropy.apply(hidden, weight, bias, targets, transform, chunk, torch.float32)


@pytest.mark.parametrize("transform", [LogitTransform(), LogitTransform(0.5), LogitTransform(2.0, 3.0)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_chunked_loss_and_gradients_equal_the_plain_ones(transform: LogitTransform, has_bias: bool) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(50, 16), torch.randn(101, 16), torch.randn(101)]
    targets = torch.randint(0, 101, (50,))
    answers = []
    for chunk in (7, None):
        hidden, weight, bias = (leaf.clone().requires_grad_() for leaf in leaves)
        used = bias if has_bias else None
        if chunk is None:
            logits = F.linear(hidden, weight, used) * transform.scale
            logits = logits if transform.cap is None else torch.tanh(logits / transform.cap) * transform.cap
            loss = F.cross_entropy(logits, targets, reduction="sum")
        else:
            loss = sum_loss(hidden, weight, used, targets, transform, chunk)
        (loss * 0.25).backward()
        answers.append([loss.detach().float(), hidden.grad, weight.grad] + ([bias.grad] if has_bias else []))
    for ours, plain in zip(*answers, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


def test_no_targets_give_zero_loss_and_zero_gradients() -> None:
    weight = torch.randn(11, 4, requires_grad=True)
    hidden = torch.randn(0, 4, requires_grad=True)
    loss = sum_loss(hidden, weight, None, torch.zeros(0, dtype=torch.int64), LogitTransform(), 8)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("Llama", {}),
        ("Qwen2", {}),
        ("Qwen3", {}),
        ("Mistral", {"sliding_window": 4}),
        ("Gemma2", {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 3.0, "sliding_window": 4}),
        ("Gemma3", {"sliding_window": 4, "final_logit_softcapping": 2.0}),
        ("Phi3", {}),
        ("Cohere", {"logit_scale": 0.25}),
        ("Granite", {"logits_scaling": 4.0}),
    ],
)
def test_families_of_models_are_computed_as_they_are(kind: str, config: dict[str, Any]) -> None:
    """Sliding windows and soft caps are small enough here to matter in a probe of twelve tokens."""
    name = "Gemma3Text" if kind == "Gemma3" else kind
    model = build(name, **config) if kind != "Gemma3" else build_gemma3(config)
    verify(TrainingModel(model, document_attention=True), packed=True, device=torch.device("cpu"))


def build_gemma3(config: dict[str, Any]) -> Any:
    import transformers

    from unisono.model import attention

    attention.register()
    torch.manual_seed(0)
    settings = transformers.Gemma3TextConfig(**(SMALL | config))
    settings._attn_implementation = attention.NAME
    return transformers.Gemma3ForCausalLM(settings)


def test_a_model_that_changes_its_logits_in_a_way_we_do_not_know_is_refused() -> None:
    model = build("Llama")
    forward = model.forward

    def changed(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output

    model.forward = changed
    with pytest.raises(ModelError, match="LlamaForCausalLM"):
        verify(TrainingModel(model, document_attention=True), packed=True, device=torch.device("cpu"))


def test_attention_sinks_are_refused_by_name() -> None:
    from unisono.model.attention import document_attention

    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ModelError, match="attention sinks"):
        document_attention(torch.nn.Linear(1, 1), q, q, q, None, document_lengths=(4,), s_aux=torch.ones(2))


def test_a_model_that_loses_the_boundaries_is_refused() -> None:
    from unisono.model.attention import document_attention

    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ModelError, match="Linear does not hand document_lengths on"):
        document_attention(torch.nn.Linear(1, 1), q, q, q, None)


def _peak_rise(action: Any) -> int:
    """Bytes that the resident set rose while ``action`` ran, sampled every millisecond."""
    process, peak, done = psutil.Process(), [0], threading.Event()
    before = process.memory_info().rss

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], process.memory_info().rss)
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    action()
    done.set()
    watcher.join()
    return peak[0] - before


def test_b50_no_logits_spike() -> None:
    """Vocabulary 32,000, batch 4 x 512, 10 % targets: equal to the plain path, with under a quarter of its memory."""
    torch.manual_seed(0)
    tokens, width, vocabulary = 4 * 512, 64, 32000
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    places = torch.arange(0, tokens, 10)
    targets = torch.randint(0, vocabulary, (len(places),))
    answers: list[list[torch.Tensor]] = []

    def ours() -> None:
        loss = sum_loss(hidden[places], weight, None, targets, LogitTransform(), 64)
        answers.append([loss.detach().float(), *torch.autograd.grad(loss, [hidden, weight])])

    def plain() -> None:
        labels = torch.full((tokens,), -100)
        labels[places] = targets
        loss = F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum")
        answers.append([loss.detach(), *torch.autograd.grad(loss, [hidden, weight])])

    risen = [_peak_rise(ours), _peak_rise(plain)]
    for a, b in zip(*answers, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert risen[0] < risen[1] / 4, risen


def test_adapters_that_match_nothing_are_refused(tiny: Path) -> None:
    from unisono.config.schema import LoraSection, ModelSection
    from unisono.model.load import load_model

    section = ModelSection(path=str(tiny), lora=LoraSection(targets=["q_proj", "query"]))
    with pytest.raises(ModelError, match=r"called query; this model has .*q_proj"):
        load_model(section, tiny, weights=torch.float32, seed=0)


def test_an_adapter_finds_its_base_again_from_anywhere(tiny: Path, tmp_path: Path) -> None:
    from unisono.model.load import base_name

    assert base_name(str(tiny), tiny) == str(tiny.absolute())
    assert base_name("starter", tiny) == str(tiny.absolute())
    assert base_name("org/model", tmp_path / "snapshot") == "org/model"


def test_all_linear_leaves_the_output_head_alone(tiny: Path) -> None:
    from unisono.config.schema import LoraSection, ModelSection
    from unisono.model.load import load_model

    model = load_model(ModelSection(path=str(tiny), lora=LoraSection()), tiny, weights=torch.float32, seed=0)
    adapted = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name, _ in model.named_parameters() if ".lora_" in name}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
