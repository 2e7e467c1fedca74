"""Ask the trained model: one prompt in, one answer out, always the same one (greedy)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unisono.errors import ModelError
from unisono.export.trained import find, load
from unisono.greedy import greedy


def generate(run_dir: Path, prompt: str, *, max_new_tokens: int = 256) -> str:
    """Answer ``prompt`` with the final model of a run.

    The prompt is the user's message in the tokenizer's chat template, or plain text where it has none.
    Raises ModelError when there is no model, or nothing to go on from.
    """
    import torch

    trained = find(run_dir)
    model, tokenizer = load(trained, "auto")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids = _encode(tokenizer, prompt)
    if ids.shape[1] == 0:
        raise ModelError("the prompt has no tokens, and the tokenizer has no chat template", where="prompt")
    ids = ids.to(device)
    settings = greedy(model, tokenizer, max_new_tokens)
    with torch.inference_mode():
        rows = model.to(device).generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return str(tokenizer.decode(rows[0, ids.shape[1] :], skip_special_tokens=True))


def _encode(tokenizer: Any, prompt: str) -> Any:
    """Return the prompt's ids, ``[1, tokens]``."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt").input_ids.long()
    messages = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return encoded["input_ids"]
