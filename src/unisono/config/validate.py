"""Turn a draft into a ``RunConfig``, or say in plain words what is wrong with each key."""

from __future__ import annotations

import difflib
import json
import re

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from unisono.config import keys, source
from unisono.config.draft import Draft
from unisono.config.schema import RunConfig
from unisono.config.source import Path, dotted


def validate(draft: Draft) -> RunConfig | None:
    """Build the RunConfig; None, with the problems in the draft, where a key is unknown, missing or wrong.

    Through JSON, which is strict about kinds ("7" is no number) yet takes a list for a tuple and 1 for 1.0.
    """
    meant = _refuse_unknown(draft)
    try:
        return RunConfig.model_validate_json(json.dumps(draft.values))
    except ValidationError as error:
        seen: set[Path] = set()
        for item, path, found in _innermost(draft, error):
            if item["type"] == "missing" and isinstance(item["loc"][-1], str):
                path = (*path, item["loc"][-1])
                if dotted(path) not in meant:
                    _missing(draft, path)
            elif item["loc"][-1] == "[key]":
                draft.problem(path, f"{dotted(path)}: a name is made of letters, digits, - and _")
            elif path not in seen:
                _wrong(draft, path, found)
            seen.add(path)
        return None


def _innermost(draft: Draft, error: ValidationError) -> list[tuple[ErrorDetails, Path, object]]:
    """Give each error with its place and value; of a value that may be of several kinds only the nearest miss."""
    items = error.errors(include_url=False, include_input=False, include_context=False)
    located = [(item, *_resolve(draft.values, item["loc"])) for item in items]
    inner = {path[:end] for _, path, _ in located for end in range(len(path))}
    return [(item, path, found) for item, path, found in located if item["type"] == "missing" or path not in inner]


def _refuse_unknown(draft: Draft) -> set[str]:
    """Report and take out every key that the schema lacks; give the keys that were probably meant."""
    meant: set[str] = set()

    def walk(values: dict[str, object], at: tuple[str, ...]) -> None:
        for name in list(values):
            path = (*at, name)
            field = keys.all_keys().get(".".join(path)) if "." not in name else None
            value = values[name]
            if field is None:
                hint = keys.suggest(path)
                draft.problem(path, f"{'.'.join(path)} is not a {'key' if at else 'section'} of the run file", hint)
                meant.add(hint.rstrip("?").rpartition(" ")[2])
                del values[name]
            elif keys.section_of(field.annotation) and isinstance(value, dict):
                walk(value, path)

    walk(draft.values, ())
    return meant | {key.split(".")[0] for key in meant}


def _resolve(values: object, loc: tuple[str | int, ...]) -> tuple[Path, object]:
    """Follow ``loc`` as far as it is about our values; pydantic adds the names of union members."""
    path: Path = ()
    for part in loc:
        inside = isinstance(values, dict) and part in values
        if isinstance(values, list) and isinstance(part, int):
            inside = part < len(values)
        if not inside:
            continue
        values = values[part]  # type: ignore[index]  # just looked
        path = (*path, part)
    return path, values


def _missing(draft: Draft, path: Path) -> None:
    name = dotted(path)
    field = keys.all_keys()[name]
    section = keys.section_of(field.annotation)
    if section is None:
        takes = keys.words(field.annotation, field.metadata)
        draft.problem(path, f"{name} is missing", hint=f"it takes {takes}: {field.description}")
        return
    fields = keys.fields_of(section)
    needed = [key for key, inner in fields.items() if inner.is_required()]
    hint = f"it needs {', '.join(needed)}" if needed else f"its keys are {', '.join(fields)}"
    draft.problem(path, f"the section {name} is missing", hint=hint)


def _wrong(draft: Draft, path: Path, found: object) -> None:
    """Report a value of the wrong kind or out of range."""
    name = dotted(path)
    key = ".".join(part for part in path if isinstance(part, str))
    entry = keys.entry_of(key.rpartition(".")[0])
    if entry is not None:
        draft.problem(path, f"{name} is {_shown(found)}, but it takes {keys.words(entry)}")
        return
    field = keys.all_keys()[key]
    takes = keys.words(field.annotation, field.metadata)
    subject = key if isinstance(path[-1], int) else "it"
    hint = _mend(key, found, takes)
    draft.problem(path, f"{name} is {_shown(found)}, but {subject} takes {takes}", hint=hint)


def _mend(key: str, found: object, takes: str) -> str | None:
    """Say how to write what was probably meant."""
    if isinstance(found, float) and found.is_integer() and takes.startswith("a whole number"):
        return f"write {int(found)}"
    if not isinstance(found, str):
        return None
    if "number" in takes and isinstance(source.scalar(found.replace(",", ".").strip()), (int, float)):
        return "write the number without quotes and with a decimal point"
    near = difflib.get_close_matches(found.lower(), re.findall(r"[\w-]+", takes), n=1, cutoff=0.6)
    if near and ("one of" in takes or "auto" in takes or "all-linear" in takes):
        return f"did you mean {near[0]}?"
    if "a list of" in takes:
        return f"write a list: {key.rpartition('.')[2]}: [{found}]"
    return None


def _shown(value: object) -> str:
    if value is None:
        return "empty"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
