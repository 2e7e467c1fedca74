"""The keys of the run file, read off the schema: which there are, what each takes, what a wrong one meant."""

from __future__ import annotations

import difflib
import types
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from unisono.config.schema import RunConfig

# What other trainers call it. Only for the hint: none of these is accepted.
_ELSEWHERE = {
    "learning_rate": "optim.lr",
    "optimizer": "optim.name",
    "lr_scheduler": "optim.schedule",
    "lr_scheduler_type": "optim.schedule",
    "scheduler": "optim.schedule",
    "warmup_steps": "optim.warmup",
    "warmup_ratio": "optim.warmup",
    "max_norm": "optim.max_grad_norm",
    "gradient_clipping": "optim.max_grad_norm",
    "gradient_clip_val": "optim.max_grad_norm",
    "batch_size": "batch.global_size",
    "train_batch_size": "batch.global_size",
    "per_device_train_batch_size": "batch.micro_size",
    "micro_batch_size": "batch.micro_size",
    "gradient_accumulation_steps": "batch.global_size (accumulation follows from it)",
    "accumulation_steps": "batch.global_size (accumulation follows from it)",
    "num_epochs": "length.epochs",
    "num_train_epochs": "length.epochs",
    "max_epochs": "length.epochs",
    "max_steps": "length.updates",
    "num_steps": "length.updates",
    "steps": "length.updates",
    "max_seq_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "sequence_len": "data.max_length",
    "cutoff_len": "data.max_length",
    "dataset": "data.train",
    "datasets": "data.train",
    "packing": "data.pack",
    "sample_packing": "data.pack",
    "val_set_size": "data.validation",
    "eval_dataset": "data.validation",
    "eval_steps": "validate.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "resume_from_checkpoint": "checkpoint.resume",
    "logging_steps": "log.every",
    "report_to": "log.trackers",
    "model_name_or_path": "model.path",
    "base_model": "model.path",
    "attn_implementation": "model.attention",
    "gradient_checkpointing": "model.activation_checkpointing",
    "lora_r": "model.lora.rank",
    "r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "target_modules": "model.lora.targets",
    "mixed_precision": "precision.compute",
    "bf16": "precision.compute",
    "fp16": "precision.compute",
    "dtype": "precision.compute",
    "torch_dtype": "precision.compute",
    "nproc_per_node": "launch.ranks",
    "num_processes": "launch.ranks",
    "num_gpus": "launch.ranks",
    "master_port": "launch.port",
}


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Give the fields of a section under the names that the run file uses."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Give the section that ``annotation`` is, or may be; None where it is a plain value."""
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            return member
    return None


@cache
def all_keys() -> dict[str, FieldInfo]:
    """Give every section and key by its dotted name, sections before their keys."""
    keys: dict[str, FieldInfo] = {}

    def walk(model: type[BaseModel], prefix: str) -> None:
        for name, field in fields_of(model).items():
            keys[prefix + name] = field
            section = section_of(field.annotation)
            if section is not None:
                walk(section, f"{prefix}{name}.")

    walk(RunConfig, "")
    return keys


def takes_any_key(key: str) -> bool:
    """Say whether ``key`` is a table whose keys are the person's own, such as ``launch.env``."""
    return entry_of(key) is not None


def entry_of(key: str) -> Any:
    """Give what the entries of a table whose keys are the person's own take; None where ``key`` is no such table."""
    field = all_keys().get(key)
    tables = [member for member in _members(field.annotation) if get_origin(member) is dict] if field else []
    return get_args(tables[0])[1] if tables else None


def wants_text(path: tuple[str | int, ...]) -> bool:
    """Say whether the value at ``path`` can be nothing but text."""
    names = [part for part in path if isinstance(part, str)]
    field = all_keys().get(".".join(names))
    annotation = field.annotation if field is not None else entry_of(".".join(names[:-1]))
    if isinstance(path[-1] if path else "", int):
        lists = [member for member in _members(annotation) if get_origin(member) is list]
        annotation = get_args(lists[0])[0] if lists else None
    return [member for member in _members(annotation) if member is not type(None)] == [str]


def suggest(path: tuple[str, ...]) -> str:
    """Say which key ``path`` was meant to be."""
    parent, key = path[:-1], path[-1]
    plain = key.strip().lower().replace("-", "_").replace(" ", "_")
    siblings = children(parent)
    if plain in siblings:
        return f"write it as {'.'.join((*parent, plain))}"
    if key in all_keys():
        section, _, last = key.rpartition(".")
        return (
            f"write the key {last} below the section {section.replace('.', ', then ')}"
            if section
            else _move(plain, parent)
        )
    homes = [known for known in all_keys() if known.rpartition(".")[2] == plain]
    if homes:
        return _belongs(plain, homes, parent)
    if plain in _ELSEWHERE:
        return f"here it is called {_ELSEWHERE[plain]}"
    return _nearest(plain, parent, siblings)


def children(parent: tuple[str, ...]) -> list[str]:
    """Give the names of the keys right below ``parent``."""
    prefix = "".join(f"{part}." for part in parent)
    return [key[len(prefix) :] for key in all_keys() if key.startswith(prefix) and "." not in key[len(prefix) :]]


def _belongs(key: str, homes: list[str], parent: tuple[str, ...]) -> str:
    if key in homes:
        return _move(key, parent)
    if len(homes) == 1:
        return f"this key belongs to section {homes[0].rpartition('.')[0]}: {homes[0]}"
    return f"this key belongs to one of {', '.join(homes)}"


def _move(section: str, parent: tuple[str, ...]) -> str:
    return f"{section} is a section of its own: move it out of {'.'.join(parent)}"


def _nearest(key: str, parent: tuple[str, ...], siblings: list[str]) -> str:
    if parent and ".".join(parent) not in all_keys():
        return suggest(parent)
    near = difflib.get_close_matches(key, siblings, n=1, cutoff=0.6)
    if near:
        return f"did you mean {'.'.join((*parent, near[0]))}?"
    by_name = {known.rpartition(".")[2]: known for known in all_keys()}
    near = difflib.get_close_matches(key, [*by_name, *_ELSEWHERE], n=1, cutoff=0.75)
    if near:
        return f"did you mean {by_name.get(near[0]) or _ELSEWHERE[near[0]]}?"
    what = f"the keys of {'.'.join(parent)} are" if parent else "the sections are"
    return f"{what} {', '.join(siblings)}" if siblings else f"{'.'.join(parent)} has no keys below it"


def words(annotation: Any, metadata: list[Any] | None = None) -> str:
    """Say in plain words what a key takes."""
    if get_origin(annotation) is Annotated:
        base, *notes = get_args(annotation)
        examples = [each for note in notes if isinstance(note, FieldInfo) for each in note.examples or []]
        if examples:
            return f"{words(base)} such as {examples[0]}"
        return words(base, [item for note in notes for item in _bounds(note)] + (metadata or []))
    if get_origin(annotation) in (Union, types.UnionType):
        return ", or ".join(words(member, metadata) for member in get_args(annotation))
    if get_origin(annotation) is Literal:
        names = [str(name) for name in get_args(annotation)]
        return names[0] if len(names) == 1 else f"one of {', '.join(names)}"
    if get_origin(annotation) is list:
        least = ", at least one" if any(isinstance(note, MinLen) for note in metadata or []) else ""
        return f"a list of {words(get_args(annotation)[0])}{least}"
    if get_origin(annotation) is tuple:
        parts = get_args(annotation)
        return f"a list of {len(parts)}: each {words(parts[0])}"
    if get_origin(annotation) is dict:
        return f"names with {words(get_args(annotation)[1])} each"
    return _plain_words(annotation, metadata or [])


def _plain_words(annotation: Any, metadata: list[Any]) -> str:
    if annotation is type(None):
        return "null"
    if section_of(annotation) is not None:
        section = section_of(annotation)
        assert section is not None
        return f"a section with the keys {', '.join(fields_of(section))}"
    if annotation is int:
        return f"a whole number{_range(metadata)}"
    if annotation is float:
        return f"a number{_range(metadata)}"
    return {bool: "true or false", str: "text"}[annotation]


def _bounds(note: Any) -> list[Any]:
    return list(note.metadata) if isinstance(note, FieldInfo) else [note]


def _range(metadata: list[Any]) -> str:
    low = next(
        (f" above {m.gt}" if isinstance(m, Gt) else f" from {m.ge}" for m in metadata if isinstance(m, (Gt, Ge))),
        "",
    )
    high = next(
        (f" below {m.lt}" if isinstance(m, Lt) else f" {m.le}" for m in metadata if isinstance(m, (Lt, Le))),
        "",
    )
    if low and high:
        return f"{low} to{high}"
    return f"{low} up" if low.startswith(" from") else low or high


def _members(annotation: Any) -> list[Any]:
    """Give the alternatives of a type, bare of their bounds."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [leaf for member in get_args(annotation) for leaf in _members(member)]
    return [annotation]
