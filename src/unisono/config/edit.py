"""Change single values in the text of a run file; everything else stays as the person wrote it, comments too."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from unisono.config.render import flow
from unisono.config.source import Loader


def put(text: str, key: tuple[str, ...], value: object) -> str:
    """Return the run file ``text`` with ``value`` at ``key``, a name or a section and names below it.

    Sections that are not there are made. An alias stands for the text it repeats, which is then what is changed: read
    the result before it is used.
    """
    node, place = yaml.compose(text, Loader=Loader), 0
    while isinstance(node, yaml.MappingNode):
        below = next((each for name, each in node.value if name.value == key[place]), None)
        if below is None:
            return _inserted(text, node, key[place], _nested(key[place + 1 :], value))
        node, place = below, place + 1
        if place == len(key):
            break
    if node is None:
        return _line(text) + f"{key[0]}: {flow(_nested(key[1:], value))}\n"
    return _replaced(text, node, _nested(key[place:], value))


def _nested(key: tuple[str, ...], value: object) -> object:
    return {key[0]: _nested(key[1:], value)} if key else value


def _inserted(text: str, node: yaml.MappingNode, name: str, value: object) -> str:
    """Add an entry: to braces at their end, to indented lines before the first, to the whole file as its last line."""
    entry, begin, end = f"{flow(name)}: {flow(value)}", node.start_mark, node.end_mark.index
    if node.flow_style:
        before = text[: end - 1]
        comma = "" if before.rstrip().endswith(("{", ",")) else ", "
        return before + comma + entry + text[end - 1 :]
    if begin.column == 0:
        return _line(text) + entry + "\n"
    return text[: begin.index] + entry + "\n" + " " * begin.column + text[begin.index :]


def _replaced(text: str, node: yaml.Node, value: object) -> str:
    begin, end = node.start_mark.index, node.end_mark.index
    is_block = text[begin : begin + 1] in ("|", ">")
    if isinstance(node, yaml.CollectionNode):
        is_block = not node.flow_style
    if is_block:  # it reaches to where the next key begins
        end = text.rfind("\n", 0, end) if "\n" in text[begin:end] else end
        begin = text.rindex(":", 0, begin) + 1
    space = " " if text[begin - 1] == ":" else ""
    return text[:begin] + space + flow(value) + text[end:]


def _line(text: str) -> str:
    return text if not text or text.endswith("\n") else text + "\n"


def put_all(text: str, values: Mapping[str, object]) -> str:
    """Return ``text`` with every value at its dotted key."""
    for key, value in values.items():
        text = put(text, tuple(key.split(".")), value)
    return text
