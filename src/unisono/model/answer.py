"""Let the model that is being trained answer, and leave no trace: weights, modes and attention are as before.

The attention that trains packed rows keeps no cache of keys and values, so answers are generated with transformers'
own. One prompt at a time: an answer then does not depend on which other prompts shared its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from unisono.model import attention


@contextmanager
def answering(causal_lm: Any) -> Iterator[None]:
    """Put a transformers model into evaluation mode, with an attention that can generate; put back what was, always."""
    was_training = [module for module in causal_lm.modules() if module.training]
    chosen = causal_lm.config._attn_implementation
    causal_lm.eval()
    if chosen == attention.NAME:
        causal_lm.set_attn_implementation(_generating_attention(causal_lm))
    try:
        yield
    finally:
        causal_lm.set_attn_implementation(chosen)
        for module in was_training:
            module.training = True


def _generating_attention(causal_lm: Any) -> str:
    """SDPA, but eager for what transformers' SDPA leaves out: soft-capping, and models that never offered it."""
    config = causal_lm.config.get_text_config().to_dict()
    can = causal_lm._supports_sdpa and config.get("attn_logit_softcapping") is None
    return "sdpa" if can else "eager"


@torch.no_grad()
def answer(
    causal_lm: Any,
    prompt: Sequence[int],
    *,
    settings: Any,
    ends: set[int],
    device: torch.device,
    on_token: Callable[[int], None],
) -> list[int]:
    """Return the ids that the model answers to ``prompt``, its end token left out. To be called inside ``answering``.

    ``settings`` is transformers' GenerationConfig; ``on_token`` is told how many tokens there are so far. Not in
    inference mode: a buffer that a model makes on the way would then be unusable in the next backward.
    """
    ids = torch.tensor([prompt], device=device)
    row = causal_lm.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings, streamer=_Counter(on_token)
    )[0]
    found: list[int] = row[len(prompt) :].tolist()
    return found[:-1] if found and found[-1] in ends else found


class _Counter:
    """What transformers calls a streamer: it is handed the prompt, then every token."""

    def __init__(self, on_token: Callable[[int], None]) -> None:
        self._on_token = on_token
        self._num_calls = 0

    def put(self, _: torch.Tensor) -> None:
        """Count a token; the first call is the prompt's."""
        self._on_token(self._num_calls)
        self._num_calls += 1

    def end(self) -> None:
        """Nothing is left to be done."""
