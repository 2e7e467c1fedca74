"""Asking the trained model: the greedy answer to the prompt in its template, and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.tiny import save_tiny
from unisono.errors import ModelError
from unisono.export.generate import generate


def greedy(folder: Path, ids: list[int], number: int) -> tuple[list[int], Any]:
    """The plain way: the whole sequence anew for every token."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = list(ids)
    for _ in range(number):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids, AutoTokenizer.from_pretrained(folder)


def run_of(folder: Path, run: Path) -> Path:
    shutil.copytree(folder, run / "model")
    return run


def test_the_answer_is_the_greedy_one_in_the_template(tiny: Path, tmp_path: Path) -> None:
    prompt = [256, *b"user\nhello", 257, 10, 256, *b"assistant\n"]
    ids, tokenizer = greedy(tiny, prompt, 12)
    answer = ids[len(prompt) :]
    answer = answer[: answer.index(257)] if 257 in answer else answer
    assert len(answer) > 2, "the model stops at once: choose another seed"
    run = run_of(tiny, tmp_path / "run")
    assert generate(run, "hello", max_new_tokens=12) == tokenizer.decode(answer, skip_special_tokens=True)
    assert generate(run / "model", "hello", max_new_tokens=12) == generate(run, "hello", max_new_tokens=12)


def test_it_stops_at_the_end_marker_and_samples_never(tiny: Path, tmp_path: Path) -> None:
    prompt = [256, *b"user\nhello", 257, 10, 256, *b"assistant\n"]
    ids, _ = greedy(tiny, prompt, 3)
    run = run_of(tiny, tmp_path / "run")
    config = run / "model" / "generation_config.json"
    settings = {"do_sample": True, "temperature": 5.0, "eos_token_id": [ids[len(prompt) + 1]]}
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    whole = generate(run, "hello", max_new_tokens=64)
    assert len(whole) <= 2
    assert whole == generate(run, "hello", max_new_tokens=64)


def test_without_a_template_the_prompt_is_plain_text(tmp_path: Path) -> None:
    plain = save_tiny(tmp_path / "plain", chat_template=None)
    ids, tokenizer = greedy(plain, list(b"once"), 5)
    answer = ids[4:]
    answer = answer[: answer.index(257)] if 257 in answer else answer
    assert generate(plain, "once", max_new_tokens=5) == tokenizer.decode(answer, skip_special_tokens=True)
    with pytest.raises(ModelError, match="no tokens"):
        generate(plain, "")


def test_an_adapter_answers_through_its_base(tiny: Path, tmp_path: Path) -> None:
    from support.adapter import save_adapter
    from unisono.export.export import export

    save_adapter(tiny, tmp_path / "run" / "model", scale=0.5)
    export(tmp_path / "run", tmp_path / "merged", merge=True)
    answer = generate(tmp_path / "run", "hello", max_new_tokens=8)
    assert answer == generate(tmp_path / "merged", "hello", max_new_tokens=8)
    assert answer != generate(tiny, "hello", max_new_tokens=8)
