"""The five shapes of a record, and what they become: a conversation or a plain text.

A shape is recognised by its fields or named in ``data.format``; it is never guessed. Files that call their fields
otherwise say so in ``data.fields``, which maps our name to theirs. What would change the meaning of a record and is
not understood makes the record unusable instead of being left out silently.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from unisono.config.schema import FieldName
from unisono.data.turns import Message, kind_of, names_of, read_message, read_tools, refuse_fields, string
from unisono.errors import DataError

__all__ = ["Conversation", "Message", "Shape", "Text", "content_share", "convert", "ignored_fields", "recognise"]

Shape = Literal["messages", "conversations", "instruction", "prompt_completion", "text"]

FIELDS: dict[Shape, tuple[FieldName, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "instruction": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
OPTIONAL: dict[Shape, tuple[FieldName, ...]] = {
    "messages": ("tools",),
    "conversations": ("tools",),
    "instruction": ("input",),
    "prompt_completion": (),
    "text": (),
}
# What a list of messages calls speaker and text.
TURN_FIELDS: dict[str, tuple[FieldName, FieldName]] = {
    "messages": ("role", "content"),
    "conversations": ("from", "value"),
}
SHAPES_HINT = """a record has one of these shapes:
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    {"instruction": "...", "input": "...", "output": "..."}      (input may be absent)
    {"prompt": "...", "completion": "..."}
    {"text": "..."}
    fields with other names are named in data.fields={our name: the file's name}"""
CHANGES_A_RECORD = ("functions", "images", "history", "system")


@dataclass(frozen=True)
class Conversation:
    """Turns of which at least one is the assistant's; ``where`` is ``file:line``, ``tools`` are in OpenAI's form."""

    messages: tuple[Message, ...]
    where: str
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Text:
    """A text of which every token is learned; ``where`` is ``file:line``."""

    text: str
    where: str


def recognise(value: Mapping[str, Any], where: str, fields: Mapping[str, str] | None = None) -> Shape:
    """Name the shape of a record by its fields; DataError when none or several fit.

    fields: the file's name of a field by ours.
    """
    named = fields or {}
    fitting = [shape for shape, needed in FIELDS.items() if all(named.get(field, field) in value for field in needed)]
    if len(fitting) == 1:
        return fitting[0]
    found = names_of(value)
    if fitting:
        raise DataError(
            f"the record fits several shapes: {' and '.join(fitting)} (its fields: {found})",
            where=where,
            hint=f"name the one that is meant: data.format={fitting[0]}",
        )
    hint = SHAPES_HINT
    if not named and {"question", "answer"} <= set(value):
        hint += "\n    here: data.fields={prompt: question, completion: answer}"
    raise DataError(f"the shape of the record is not known (its fields: {found})", where=where, hint=hint)


def convert(
    value: Mapping[str, Any], shape: Shape, where: str, fields: Mapping[str, str] | None = None
) -> Conversation | Text:
    """Turn a record of the given shape into a conversation or a text; DataError when it is of another shape.

    instruction/input/output and prompt/completion become one user and one assistant message; the input follows the
    instruction after an empty line. fields: the file's name of a field by ours.
    """
    named = fields or {}
    needed = [named.get(field, field) for field in FIELDS[shape]]
    for field in needed:
        if field not in value:
            raise DataError(
                f"the record is not of the shape {shape}: no {field!r} (its fields: {names_of(value)})", where=where
            )
    taken = {*needed, *(named.get(field, field) for field in OPTIONAL[shape])}
    refuse_fields(value, tuple(name for name in CHANGES_A_RECORD if name not in taken), "the record", where)
    if shape == "messages" or shape == "conversations":
        role_field, text_field = (named.get(field, field) for field in TURN_FIELDS[shape])
        tools = value.get(named.get("tools", "tools"))
        return _conversation(value[needed[0]], tools, role_field, text_field, where)
    refuse_fields(value, tuple(name for name in ("tools",) if name not in taken), "the record", where)
    first = string(value[needed[0]], needed[0], where)
    if shape == "text":
        if not first.strip():
            raise DataError(f"{needed[0]!r} is empty", where=where)
        return Text(first, where)
    more_field = named.get("input", "input")
    if shape == "instruction" and value.get(more_field):
        first += "\n\n" + string(value[more_field], more_field, where)
    answer = string(value[needed[1]], needed[1], where)
    if not answer.strip():
        raise DataError(f"{needed[1]!r} is empty: there is nothing to learn from it", where=where)
    return Conversation((Message("user", first), Message("assistant", answer)), where)


def ignored_fields(value: Mapping[str, Any], shape: Shape, fields: Mapping[str, str] | None = None) -> set[str]:
    """Name the fields of a record that play no part."""
    named = fields or {}
    return set(value) - {named.get(field, field) for field in FIELDS[shape] + OPTIONAL[shape]}


def content_share(record: Conversation | Text) -> float:
    """Map a record's content to a number in [0, 1) that depends on nothing else: equal content, equal number."""
    content: list[Any] = (
        [record.text] if isinstance(record, Text) else [_content(message) for message in record.messages]
    )
    if isinstance(record, Conversation) and record.tools:
        content.append(["tools", json.dumps(record.tools)])
    digest = hashlib.sha256(orjson.dumps(content)).digest()
    # 53 bits, the size of a float's mantissa: with 64 the division could round up to 1.0.
    return float((int.from_bytes(digest[:8], "big") >> 11) / 2**53)


def _content(message: Message) -> list[Any]:
    # Not orjson: of what stands in a text, numbers may be larger than it writes.
    more = [] if message.is_plain else [message.reasoning, json.dumps(message.tool_calls)]
    return [message.role, message.content, *more]


def _conversation(turns: Any, tools: Any, role_field: str, text_field: str, where: str) -> Conversation:
    if not isinstance(turns, list) or not turns:
        raise DataError(f"the list of messages is {kind_of(turns)}; at least one message is needed", where=where)
    messages = tuple(read_message(turn, i, role_field, text_field, where) for i, turn in enumerate(turns, 1))
    if all(message.role != "assistant" for message in messages):
        roles = ", ".join(message.role for message in messages)
        raise DataError(f"no assistant message: there is nothing to learn (roles: {roles})", where=where)
    return Conversation(messages, where, read_tools(tools, where) if tools else ())
