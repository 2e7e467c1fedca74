"""The model that a run left behind: where it lies, whether it is an adapter, and how to load it."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.errors import ModelError

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class Trained:
    """A trained model's folder; ``base`` is the model that an adapter belongs to, None for a full model."""

    folder: Path
    base: str | None


def find(run: Path) -> Trained:
    """Find the final model of a run; ``run`` may also be the model's folder itself.

    Raises ModelError when there is none, or none yet.
    """
    for folder in (run / "model", run):
        if (folder / ADAPTER_CONFIG).is_file():
            return _whole(Trained(folder, _base_of(folder)))
        if (folder / CONFIG).is_file():
            return _whole(Trained(folder, None))
    if not run.exists():
        raise ModelError("there is no such folder", where=str(run), hint="give the run's output_dir")
    if (run / "run.yaml").is_file():
        raise ModelError(
            "the run is not finished: it has no model/ yet",
            where=str(run),
            hint="`unisono train` with the same run file goes on from the newest checkpoint",
        )
    raise ModelError(
        f"neither a run folder with model/ nor a model folder: no {CONFIG}, no {ADAPTER_CONFIG}",
        where=str(run),
        hint="give the run's output_dir",
    )


def _whole(trained: Trained) -> Trained:
    """Refuse a folder without weights."""
    pattern = "*.safetensors" if trained.base is None else "adapter_model.safetensors"
    if not any(trained.folder.glob(pattern)):
        raise ModelError(f"the folder has no weights: no {pattern}", where=str(trained.folder))
    return trained


def _base_of(adapter: Path) -> str:
    path = adapter / ADAPTER_CONFIG
    try:
        base = json.loads(path.read_bytes()).get("base_model_name_or_path")
    except ValueError as error:
        raise ModelError(f"not JSON: {error}", where=str(path)) from None
    if not isinstance(base, str) or not base:
        raise ModelError(f"base_model_name_or_path is {base!r}, needed is a folder or a hub id", where=str(path))
    return base


def load(trained: Trained, dtype: str) -> tuple[Any, Any]:
    """Load the model and its tokenizer; ``dtype`` is ``auto`` (as saved) or a name torch knows.

    Returns a transformers model, or a peft model around it, in evaluation mode on the CPU. Raises ModelError.
    """
    from transformers import AutoTokenizer

    model = _load_transformers(trained.base or str(trained.folder), trained, dtype)
    if trained.base is not None:
        model = _put_adapter(model, trained)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(trained.folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"the tokenizer cannot be loaded: {error}", where=str(trained.folder)) from error
    return model.eval(), tokenizer


def _load_transformers(name: str, trained: Trained, dtype: str) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except (OSError, ValueError, SafetensorError) as error:
        if trained.base is None:
            raise ModelError(f"the model cannot be loaded: {error}", where=name) from error
        raise ModelError(
            f"the adapter's base model {name} cannot be loaded: {str(error).splitlines()[0]}",
            where=str(trained.folder / ADAPTER_CONFIG),
            hint="base_model_name_or_path there must name the model the adapter was trained on: a folder, a hub id",
        ) from error


def _put_adapter(model: Any, trained: Trained) -> Any:
    from peft import PeftModel

    try:
        with warnings.catch_warnings():
            # peft asks transformers by a name that is to go: no news for the user
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
            return PeftModel.from_pretrained(model, str(trained.folder))
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: shapes that do not fit
        raise ModelError(
            f"the adapter does not fit its base model {trained.base}: {error}", where=str(trained.folder)
        ) from error
