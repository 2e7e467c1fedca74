"""Configurations of well-known models, without the models."""

from __future__ import annotations

from typing import Any

LLAMA_2_7B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000, "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}  # fmt: skip
