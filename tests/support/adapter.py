"""An adapter folder as a run leaves it, without the run."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any


def save_adapter(base: Path, folder: Path, *, targets: Any = "all-linear", scale: float = 0.05) -> Path:
    """Write an adapter whose product is not zero, as a run does, with the tokenizer beside it."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        torch.manual_seed(3)
        adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM"))
        for name, value in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(value, std=scale)
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(base / file, folder / file)
    return folder
