"""Write the final model so that transformers (or peft, for adapters) loads it as it is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
)


def save_model(model: Any, source: Path, folder: Path, *, base: str) -> None:
    """Write ``model`` (transformers or peft) with the tokenizer of ``source`` into ``folder``, by one rename.

    Weights are written as they were trained. An adapter names ``base``, the model it belongs to.
    """
    private = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(private, ignore_errors=True)
    private.mkdir(parents=True)
    _name_base(model, base)
    model.save_pretrained(private)
    for pattern in (*TOKENIZER_FILES, "generation_config.json"):
        for file in source.glob(pattern):
            shutil.copyfile(file, private / file.name)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(private, folder)
    shutil.rmtree(old, ignore_errors=True)


def _name_base(model: Any, base: str) -> None:
    from peft import PeftModel

    if isinstance(model, PeftModel):
        for settings in model.peft_config.values():
            settings.base_model_name_or_path = base
