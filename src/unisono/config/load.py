"""Read a run file and the overrides into a ``RunConfig``, and keep where each value came from.

Everything that is wrong with single keys is found in one pass and reported in one error: file, line, key,
what is there, what is needed, and the nearest right key. What keys say together is judged in ``check.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from unisono.config import keys, paths, source
from unisono.config.draft import COMMAND_LINE, DEFAULT, Draft, Place
from unisono.config.schema import RunConfig
from unisono.config.source import Path as KeyPath
from unisono.config.source import dotted
from unisono.config.validate import validate
from unisono.errors import ConfigError

_LISTS_OF_PATHS = ("data.train", "data.validation")
_PATHS = (*_LISTS_OF_PATHS, "run.output_dir", "data.cache_dir", "checkpoint.resume", "model.path")
_KEY = re.compile(r"[^\s=]+")
_AFTER_THE_FILE = 1 << 31  # problems are shown in the order of lines, those of the command line last


@dataclass(frozen=True)
class Loaded:
    """A run file as read: the values, where each came from (by dotted key), and the file itself."""

    config: RunConfig
    origins: dict[str, str]
    path: Path


def load(path: Path, overrides: Sequence[str] = ()) -> Loaded:
    """Read the run file at ``path``; ``overrides`` are ``section.key=value``, and the last one wins.

    Raises ConfigError with every problem at once.
    """
    return load_text(_read_file(path), path, overrides)


def load_text(text: str, path: Path, overrides: Sequence[str] = ()) -> Loaded:
    """Read the run file ``text`` as if it were at ``path``. Raises ConfigError with every problem at once."""
    draft = _draft(text, path)
    for override in overrides:
        _apply(draft, override)
    _expand_paths(draft)
    config = validate(draft)
    if draft.problems or config is None:
        ordered = sorted(draft.problems, key=lambda item: item[0])
        raise ConfigError.of([problem for _, problem in ordered])
    return Loaded(config, _origins(draft, config), path)


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the run file is not UTF-8 text (byte {error.start})", where=str(path)) from None
    except OSError as error:
        raise ConfigError(f"the run file cannot be read: {error.strerror}", where=str(path)) from None


def _draft(text: str, path: Path) -> Draft:
    tree = source.parse(text, str(path), keys.wants_text)
    sections = keys.children(())
    if tree.values is not None and not isinstance(tree.values, dict):
        raise ConfigError(f"the run file must hold sections: {', '.join(sections)}", where=str(path))
    draft = Draft({name: {} if value is None else value for name, value in (tree.values or {}).items()})
    draft.places[()] = Place(str(path), path.name, 0)
    for key, line in tree.lines.items():
        draft.places[key] = Place(f"{path}:{line}", f"{path.name}:{line}", line)
    draft.problems += [(_line(problem), problem) for problem in tree.problems]
    return draft


def _line(problem: ConfigError) -> int:
    return int((problem.where or "0").rpartition(":")[2])


def _apply(draft: Draft, override: str) -> None:
    """Put one override into the draft, or note what is wrong with it."""
    place = Place(f"override {override!r}", COMMAND_LINE, _AFTER_THE_FILE)
    try:
        key, value = read_override(override)
    except ConfigError as error:
        draft.problems.append((_AFTER_THE_FILE, ConfigError(error.message, where=place.where, hint=error.hint)))
        return
    if draft.put(key, value):
        draft.places = {path: at for path, at in draft.places.items() if path[: len(key)] != key}
        draft.places[key] = place
    elif (table := key[:-1]) and keys.takes_any_key(dotted(table)):
        problem = ConfigError(f"{dotted(table)} has no keys below it: it is a list", where=place.where)
        draft.problems.append((_AFTER_THE_FILE, problem))


def read_override(override: str) -> tuple[tuple[str, ...], object]:
    """Read ``section.key=value`` into a key and a plain value. Raises ConfigError."""
    name, equals, text = override.partition("=")
    if not equals or not _KEY.fullmatch(name):
        raise ConfigError("an override has the form section.key=value", hint="for example optim.lr=1e-4")
    if not override.isprintable():
        raise ConfigError("an override must be printable text in UTF-8")
    key = tuple(name.split("."))
    if name not in keys.all_keys() and not keys.takes_any_key(".".join(key[:-1])):
        raise ConfigError(f"{name} is not a key of the run file", hint=keys.suggest(key))
    if keys.wants_text(key) and not text.startswith(("'", '"')):
        return key, text  # as typed: "#", ":" and "[" mean nothing to a shell
    try:
        tree = source.parse(text, f"override {override!r}", keys.wants_text, key)
    except ConfigError as error:
        quoted = json.dumps(text, ensure_ascii=False)
        raise ConfigError(error.message, hint=f"quote the value: '{name}={quoted}'") from None
    if tree.problems:
        raise tree.problems[0]
    empty_section = tree.values is None and len(key) == 1
    return key, {} if empty_section else tree.values


def _expand_paths(draft: Draft) -> None:
    """Expand every path in place."""
    data = draft.values.get("data")
    if isinstance(data, dict):
        data.setdefault("cache_dir", keys.all_keys()["data.cache_dir"].default)
    for key in _PATHS:
        section, name = key.split(".")
        values = draft.values.get(section)
        if not isinstance(values, dict) or name not in values:
            continue
        value = values[name]
        if isinstance(value, list):
            values[name] = [_expanded(draft, (section, name, at), item, key) for at, item in enumerate(value)]
        elif isinstance(value, dict):
            for entry, items in value.items():
                if isinstance(items, list):
                    at = (section, name, entry)
                    value[entry] = [_expanded(draft, (*at, k), item, key) for k, item in enumerate(items)]
        elif key not in _LISTS_OF_PATHS:
            values[name] = _expanded(draft, (section, name), value, key)


def _expanded(draft: Draft, path: KeyPath, value: object, key: str) -> object:
    if not isinstance(value, str) or (key == "checkpoint.resume" and value in ("auto", "never")):
        return value
    expand: Callable[[str], str] = paths.expand_model if key == "model.path" else paths.expand
    try:
        return expand(value)
    except paths.BadPath as error:
        draft.problem(path, f"{dotted(path)}: {error}")
        return value


def _origins(draft: Draft, config: RunConfig) -> dict[str, str]:
    """Give the origin of every single value by its dotted key; of ``model.lora`` or of the keys below it."""
    origins = {}
    for key in keys.all_keys():
        absent = "model.lora." if config.model.lora is None else "model.lora"
        if "." in key and key != absent and not (absent.endswith(".") and key.startswith(absent)):
            origins[key] = _origin(draft, tuple(key.split(".")))
    return origins


def _origin(draft: Draft, path: tuple[str, ...]) -> str:
    """Give the place of ``path`` where the person wrote it, alone or within an override of its section."""
    place = draft.place(path)
    if path in draft.places:
        return place.origin
    return COMMAND_LINE if place.origin == COMMAND_LINE and draft.given(path) else DEFAULT
