"""What a model's ``config.json`` says, without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from unisono.errors import ConfigError, ModelError


@dataclass(frozen=True)
class Facts:
    """The few numbers of an architecture that preparing and balancing need."""

    context_tokens: int
    hidden_size: int
    num_layers: int
    vocabulary: int


def read_facts(folder: Path) -> Facts:
    """Read the facts of the model in ``folder``; a missing file or number is a ModelError."""
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(
            f"{folder} is not a model: it has no config.json",
            where="model.path",
            hint="give a folder written by save_pretrained, a hub id, or 'starter'",
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"config.json is not JSON: {error}", where=str(file)) from None
    if not isinstance(config, dict):
        raise ModelError("config.json is not an object", where=str(file))
    text: dict[str, Any] = config.get("text_config") or config
    return Facts(
        context_tokens=_number(text, file, "max_position_embeddings", "n_positions", "n_ctx"),
        hidden_size=_number(text, file, "hidden_size", "n_embd", "d_model"),
        num_layers=_number(text, file, "num_hidden_layers", "n_layer", "num_layers"),
        vocabulary=_number(text, file, "vocab_size"),
    )


def sample_tokens(max_length: int | Literal["auto"], facts: Facts) -> int:
    """Return the most tokens of a sample: ``data.max_length``, which must fit the model, or the model's context."""
    if max_length == "auto":
        return facts.context_tokens
    if max_length > facts.context_tokens:
        raise ConfigError(
            f"data.max_length is {max_length} but the model's context is {facts.context_tokens}",
            where="data.max_length",
            hint=f"use data.max_length=auto, or at most {facts.context_tokens}",
        )
    return max_length


def _number(config: dict[str, Any], file: Path, *names: str) -> int:
    for name in names:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise ModelError(f"none of {', '.join(names)} is in the model's configuration", where=str(file))
