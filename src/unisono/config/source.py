"""YAML as the person wrote it: plain values, and the line of every key.

The scalars follow YAML 1.2 where 1.1 sets traps: ``2e-5`` is a number; ``007``, ``12:30`` and dates are text;
and a key that wants text takes the text as written (``name: 2026`` is "2026", ``name: no`` is "no").
Refused: the same key twice, merge keys, more than one document.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import yaml

from unisono.errors import ConfigError

Path = tuple[str | int, ...]
_TAG = "tag:yaml.org,2002:"
_SCALARS = (
    ("bool", re.compile(r"(?:yes|no|true|false|on|off)$", re.IGNORECASE)),
    ("int", re.compile(r"[-+]?(?:0|[1-9][0-9_]{0,40})$")),
    ("float", re.compile(r"[-+]?(?:\.\d+|\d+\.\d*|\d+(?=e))(?:e[-+]?\d{1,4})?$", re.IGNORECASE | re.ASCII)),
    ("float", re.compile(r"[-+]?\.(?:inf|nan)$", re.IGNORECASE)),
    ("null", re.compile(r"(?:~|null|Null|NULL|)$")),
)
_RESOLVERS = [(_TAG + kind, pattern) for kind, pattern in _SCALARS]


class Loader(yaml.SafeLoader):
    """Find the type of a plain scalar by the rules above, whatever character it starts with."""

    yaml_implicit_resolvers = {None: _RESOLVERS}  # noqa: RUF012 (the shape that the base class reads)


@dataclass
class Tree:
    """Plain values with the line of every key, and what was wrong on the way."""

    values: object
    lines: dict[Path, int] = field(default_factory=dict)
    problems: list[ConfigError] = field(default_factory=list)


def parse(text: str, source: str, wants_text: Callable[[Path], bool], at: Path = ()) -> Tree:
    """Read one YAML document found at ``source``; ``wants_text`` says which paths take a scalar as written.

    Raises ConfigError where the text is not YAML at all.
    """
    try:
        node = yaml.compose(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(*_syntax(error), where=_where(source, error), hint=_syntax_hint(error)) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"this is not YAML: {error}".replace("\n", " "), where=source) from None
    except RecursionError:
        raise ConfigError("the YAML is nested too deeply", where=source) from None
    tree = Tree(None)
    if node is not None:
        tree.values = _Reader(tree, source, wants_text).value(node, at)
    return tree


def scalar(text: str) -> object:
    """Read ``text`` as one plain scalar."""
    for kind, pattern in _SCALARS:
        if pattern.match(text):
            return _scalar(yaml.ScalarNode(_TAG + kind, text))
    return text


class _Reader:
    """Turn nodes into values; notes lines and problems in the tree."""

    def __init__(self, tree: Tree, source: str, wants_text: Callable[[Path], bool]) -> None:
        self.tree = tree
        self.source = source
        self.wants_text = wants_text
        self.open: list[yaml.Node] = []

    def value(self, node: yaml.Node, path: Path) -> object:
        if isinstance(node, yaml.ScalarNode):
            if self.wants_text(path) and node.tag != _TAG + "null":
                return node.value
            return _scalar(node)
        if any(node is outer for outer in self.open):
            self.problem(node, "an alias (*) refers to what it is in")
            return None
        self.open.append(node)
        value = self.mapping(node, path) if isinstance(node, yaml.MappingNode) else self.sequence(node, path)
        self.open.pop()
        return value

    def sequence(self, node: yaml.Node, path: Path) -> list[object]:
        items = []
        for place, item in enumerate(node.value):
            here = (*path, place)
            self.tree.lines[here] = item.start_mark.line + 1
            items.append(self.value(item, here))
        return items

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, object]:
        values: dict[str, object] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.problem(key_node, "a key must be a plain word, not a list or a mapping")
                continue
            key = str(key_node.value)
            here = (*path, key)
            if key == "<<":
                self.problem(key_node, "merge keys (<<) are not read; write the keys out")
            elif key in values:
                message = f"{dotted(here)} is given twice, first in line {self.tree.lines[here]}"
                self.problem(key_node, message, hint="keep one of them")
            else:
                self.tree.lines[here] = key_node.start_mark.line + 1
                values[key] = self.value(value_node, here)
        return values

    def problem(self, node: yaml.Node, message: str, hint: str | None = None) -> None:
        where = f"{self.source}:{node.start_mark.line + 1}"
        self.tree.problems.append(ConfigError(message, where=where, hint=hint))


def dotted(path: Path) -> str:
    """Write a path as people do: ``data.train[0]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _scalar(node: yaml.ScalarNode) -> object:
    kind, text = node.tag.removeprefix(_TAG), str(node.value)
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() in ("yes", "true", "on")
    if kind == "int":
        return int(text.replace("_", ""))
    if kind == "float":
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _syntax(error: yaml.MarkedYAMLError) -> tuple[str]:
    parts = [part for part in (error.context, error.problem) if part]
    return (f"this is not YAML: {', '.join(parts)}",)


def _where(source: str, error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    return source if mark is None else f"{source}:{mark.line + 1}"


def _syntax_hint(error: yaml.MarkedYAMLError) -> str | None:
    if "'\\t'" in (error.problem or ""):
        return "indent with spaces, not with tabs"
    return None
