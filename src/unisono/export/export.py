"""Hand the trained model over: as it was trained, cast, or with the adapter merged into its base.

Refuses to merge where there is no adapter (a second merge too), to cast a value into a format that cannot hold
it, and to write into a folder that holds something.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.errors import ModelError
from unisono.export.publish import check_target, publish
from unisono.export.trained import CONFIG, Trained, find, load

if TYPE_CHECKING:
    import torch

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
ADAPTER_FILES = ("adapter_*", "README.md")
WEIGHTS = "*.safetensors"
MERGE_TOLERANCE = 1e-4  # of the largest logit; fp32 sums in another order are near 1e-6


@dataclass(frozen=True)
class MergeError:
    """What a merge changed. Each error is relative: a norm of a difference by the norm of what it should be."""

    logits: float
    weights: float
    weights_of_update: float
    worst: str


def export(run_dir: Path, out: Path, *, merge: bool = False, dtype: str | None = None) -> None:
    """Write the final model of a run into the new folder ``out``, for plain transformers (or peft).

    ``merge`` adds the adapter to its base model, in fp32. ``dtype`` (fp32, bf16, fp16) casts, last of all;
    None keeps what was trained, and fp32 after a merge. Raises ModelError and OutputError.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ModelError(f"dtype is {dtype!r}, needed is one of {', '.join(DTYPES)}", where="dtype")
    trained = find(run_dir)
    check_target(out, trained.folder)
    if merge and trained.base is None:
        raise ModelError(
            "there is no adapter to merge: this is a full model, trained as one or merged already",
            where=str(trained.folder),
            hint="export it without --merge",
        )
    with publish(out) as work:
        if merge:
            _say(_describe(_merge(trained, work, dtype), dtype))
        else:
            for path in trained.folder.iterdir():
                if path.is_file():
                    shutil.copyfile(path, work / path.name)
        if dtype is not None:
            _cast(work, dtype)
    kind = "full model" if merge or trained.base is None else f"adapter for {trained.base}"
    _say(f"{kind} written to {out}")


def _merge(trained: Trained, work: Path, dtype: str | None) -> MergeError:
    """Merge in fp32 and write the full model with the tokenizer's files; tell what that changed."""
    import torch

    _say(f"loading {trained.base} and the adapter in fp32")
    model, _ = load(trained, "float32")
    probe = torch.arange(16).remainder(model.config.get_text_config().vocab_size)[None]
    with torch.inference_mode():
        wanted = model(input_ids=probe).logits
        updates = _norms_of_updates(model)
        merged = model.merge_and_unload(safe_merge=True)
        got = merged(input_ids=probe).logits
    logits = float((got - wanted).abs().max() / wanted.abs().max())
    if not logits <= MERGE_TOLERANCE:
        raise ModelError(
            f"the merged model answers differently: logits are off by {logits:.1e} of the largest, "
            f"allowed is {MERGE_TOLERANCE:.0e}",
            where=str(trained.folder),
            hint="an adapter on a shared weight (a tied output head) cannot be merged: export without --merge",
        )
    merged.save_pretrained(work)
    for path in trained.folder.iterdir():
        if path.is_file() and not any(path.match(pattern) for pattern in ADAPTER_FILES):
            shutil.copyfile(path, work / path.name)
    return _measure(merged, updates, logits, dtype)


def _norms_of_updates(model: Any) -> dict[str, float]:
    """Give the norm of what each adapter adds, by the name of the weight it adds to."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    norms = {}
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            layer: Any = module  # every LoRA layer has the method, their base class does not name it
            for adapter in layer.active_adapters:
                norms[name.removeprefix("base_model.model.")] = float(layer.get_delta_weight(adapter).norm())
    return norms


def _measure(model: Any, updates: dict[str, float], logits: float, dtype: str | None) -> MergeError:
    """Find the matrix that the cast to ``dtype`` changes most, relative to the merged matrix."""
    found = MergeError(logits, 0.0, 0.0, "")
    for name, update in updates.items():
        value = model.get_submodule(name).weight
        loss = float((_as(value, dtype).float() - value).norm())
        error = loss / max(float(value.norm()), 1e-30)
        if error >= found.weights:
            found = MergeError(logits, error, loss / update if update else 0.0, name)
    return found


def _describe(error: MergeError, dtype: str | None) -> str:
    text = f"merged in fp32: logits within {error.logits:.1e} of the adapter's (relative to the largest)"
    if error.weights == 0.0:
        return f"{text}; largest relative error of a weight matrix 0 in {dtype or 'fp32'}"
    return (
        f"{text}; largest relative error of a weight matrix in {dtype} {error.weights:.1e} "
        f"({error.weights_of_update:.1%} of what training changed there), {error.worst}"
    )


def _as(value: torch.Tensor, dtype: str | None) -> torch.Tensor:
    """Cast a floating-point tensor; with None, and if it is of another kind, it stays as it is."""
    import torch

    if dtype is None or not value.is_floating_point():
        return value
    kind: torch.dtype = getattr(torch, DTYPES[dtype])
    return value.to(kind)


def _cast(folder: Path, dtype: str) -> None:
    """Cast the weights of a folder, one file at a time; its configuration and index follow."""
    total = sum(_cast_file(path, dtype) for path in sorted(folder.glob(WEIGHTS)))
    config, index = folder / CONFIG, folder / "model.safetensors.index.json"
    if config.is_file():
        values = json.loads(config.read_bytes())
        values.pop("torch_dtype", None)  # the name it had before transformers 5
        config.write_text(json.dumps(values | {"dtype": DTYPES[dtype]}, indent=2) + "\n")
    if index.is_file():
        values = json.loads(index.read_bytes())
        values["metadata"]["total_size"] = total
        index.write_text(json.dumps(values, indent=2) + "\n")


def _cast_file(path: Path, dtype: str) -> int:
    """Cast one safetensors file in place and return the size of its tensors in bytes."""
    from safetensors import safe_open
    from safetensors.torch import save

    cast = {}
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        for name in file.keys():  # noqa: SIM118  # not a mapping: it has no iterator
            value = file.get_tensor(name)
            cast[name] = _as(value, dtype)
            if value.isfinite().all() and not cast[name].isfinite().all():
                raise ModelError(
                    f"a value of {float(value.abs().max()):.3g} in {name} is too large for {dtype}",
                    where=str(path.name),
                    hint="bf16 has the range of fp32",
                )
    path.write_bytes(save(cast, metadata))
    return sum(value.nbytes for value in cast.values())


def _say(text: str) -> None:
    print(f"export: {text}", flush=True)
