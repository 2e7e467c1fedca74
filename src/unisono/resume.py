"""Between a run in memory and a checkpoint on disk: which tensors, which settings, how to go on.

A checkpoint holds the trainable parameters and the optimizer's state by parameter name, and the trainer's scalars in
its manifest; there is no generator state, since every update seeds itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from unisono.checkpoint.load import check_names, load_checkpoint, stored_tensors
from unisono.checkpoint.manifest import compare_settings, newest_sound, read, verify
from unisono.checkpoint.save import remove_leftovers
from unisono.config.schema import RunConfig
from unisono.data.order import ORDER_VERSION
from unisono.dist import World, agree
from unisono.errors import CheckpointError, ConfigError, OutputError
from unisono.goodput import counted
from unisono.optim import empty_state, optimizer_state, restore_state
from unisono.state import TrainState

MODEL, OPTIMIZER = "model/", "optimizer/"
FIXED = {  # what the update numbered u means: changing one of these changes the run
    "optim": (
        "name",
        "lr",
        "lr_scaling",
        "lr_reference_batch",
        "schedule",
        "warmup",
        "weight_decay",
        "betas",
        "eps",
        "momentum",
        "max_grad_norm",
    ),
    "run": ("seed",),
    "batch": ("global_size", "global_tokens"),
    "data": ("shuffle", "weights"),
    "model": ("path", "lora"),  # adapters are stored without their base
    "precision": ("compute", "weights"),
}


def fixed_settings(config: RunConfig, *, data_key: str, total: int, compute: str) -> dict[str, Any]:
    """Return the settings that a resumed run must share with the one that saved, as JSON would give them back."""
    values = config.model_dump(mode="json")
    settings = {f"{section}.{key}": values[section][key] for section, keys in FIXED.items() for key in keys}
    return settings | {
        "data": data_key,
        "version of the order of samples": ORDER_VERSION,
        "updates in all": total,
        "precision.compute": compute,
    }


def collect(named: list[tuple[str, torch.nn.Parameter]], optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, by name."""
    model = {MODEL + name: parameter.detach() for name, parameter in named}
    return model | {OPTIMIZER + name: tensor for name, tensor in optimizer_state(optimizer, named).items()}


def trainable(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters that are trained, each once (tied ones have one name)."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def find_checkpoint(
    config: RunConfig, folder: Path, world: World, say: Callable[[str], None], *, last: int | None = None
) -> Path | None:
    """Collective. Return the verified checkpoint to go on from; rank 0 looks, all ranks get its answer.

    With ``last``, the newest one of this run up to that update.
    """
    answer: dict[str, str] = {}
    if world.is_first:
        for name in remove_leftovers(folder):
            say(f"removed {name}: left behind by a save that was cut short")
        answer = _look(config.checkpoint.resume if last is None else "auto", folder, say, last)
    answer = json.loads(agree(json.dumps(answer)))
    if "refused" in answer:
        raise OutputError(
            answer["refused"],
            where="checkpoint.resume",
            hint="set checkpoint.resume=auto to go on from the newest sound one, or choose another run.output_dir",
        )
    if "folder" not in answer:
        return None
    found = Path(answer["folder"])
    if world.is_first and (before := read(found).world) != world.size:
        saved_on = counted(before, "rank")
        say(f"{found.name} was saved on {saved_on} and goes on on {world.size}: the same samples, other roundings")
    return found


def _look(resume: str, folder: Path, say: Callable[[str], None], last: int | None) -> dict[str, str]:
    if resume not in {"auto", "never"}:
        try:
            verify(Path(resume))
        except CheckpointError as error:
            return {"refused": str(error)}
        return {"folder": resume}
    newest, passed_over = newest_sound(folder, last)
    if resume == "never":
        return {"refused": f"{folder} holds checkpoints of an earlier run, such as {newest.name}"} if newest else {}
    for line in passed_over:
        say(line)
    return {"folder": str(newest)} if newest else {}


def restore(
    folder: Path,
    named: list[tuple[str, torch.nn.Parameter]],
    kept: list[tuple[str, torch.nn.Parameter]],
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    *,
    allow_changes: list[str],
    world: World,
) -> TrainState:
    """Collective. Load a verified checkpoint into model and optimizer; refuse settings that differ unless allowed.

    ``kept``: the parameters whose optimizer state belongs on this rank.
    """
    manifest = read(folder)
    unknown = sorted(set(allow_changes) - settings.keys())
    if unknown:
        raise ConfigError(
            f"{', '.join(unknown)}: no such setting is compared; these are: {', '.join(sorted(settings))}",
            where="checkpoint.allow_changes",
        )
    changed = compare_settings(
        *({k: v for k, v in s.items() if k not in allow_changes} for s in (manifest.settings, settings))
    )
    if changed:
        raise ConfigError(
            "the checkpoint was saved with other settings\n    " + "\n    ".join(changed),
            where=str(folder),
            hint="restore them, use another run.output_dir, or name them in checkpoint.allow_changes",
        )
    tensors = {MODEL + name: parameter.detach() for name, parameter in named}
    stored = stored_tensors(folder)
    check_names({name for name in stored if name.startswith(MODEL)}, tensors.keys(), where=folder)
    optimizers = {name.removeprefix(OPTIMIZER): each for name, each in stored.items() if name.startswith(OPTIMIZER)}
    moments = empty_state(optimizers, kept)
    load_checkpoint(folder, tensors | {OPTIMIZER + name: tensor for name, tensor in moments.items()}, world=world)
    restore_state(optimizer, moments, kept)
    return TrainState(**manifest.state)
