"""How an answer is generated wherever one is: the most likely token each time, until an end token or a limit."""

from __future__ import annotations

from typing import Any


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Return the ids that end an answer: the tokenizer's end token and those of the model's generation settings."""
    theirs = model.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(theirs if isinstance(theirs, list) else [theirs])} - {None}


def greedy(model: Any, tokenizer: Any, max_new_tokens: int) -> Any:
    """Make settings of our own: those that came with the model may sample, and say so in warnings."""
    from transformers import GenerationConfig

    ends = end_tokens(model, tokenizer)
    padding = tokenizer.pad_token_id
    return GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        use_cache=True,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(ends) or None,
        pad_token_id=padding if padding is not None else min(ends, default=None),
    )
