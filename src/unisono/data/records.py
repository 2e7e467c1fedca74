"""The five shapes of a record, and what they become: a conversation or a plain text.

A shape is recognised by its fields or named in ``data.format``; it is never guessed. What would change the meaning
of a record and is not understood (tool calls, images, per-message weights) makes the record unusable instead of
being left out silently.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import orjson

from unisono.errors import DataError

Shape = Literal["messages", "conversations", "instruction", "prompt_completion", "text"]

FIELDS: dict[Shape, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "instruction": ("instruction", "output"),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
}
SHAPES_HINT = """a record has one of these shapes:
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    {"instruction": "...", "input": "...", "output": "..."}      (input may be absent)
    {"prompt": "...", "completion": "..."}
    {"text": "..."}"""

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
CHANGES_A_RECORD = ("tools", "functions", "images", "history", "system")
CHANGES_A_MESSAGE = (
    "tool_calls",
    "function_call",
    "tool_call_id",
    "reasoning_content",
    "reasoning",
    "thinking",
    "images",
    "weight",
    "train",
)


@dataclass(frozen=True)
class Message:
    """One turn: who speaks, and what."""

    role: str
    content: str


@dataclass(frozen=True)
class Conversation:
    """Turns of which at least one is the assistant's; ``where`` is ``file:line``."""

    messages: tuple[Message, ...]
    where: str


@dataclass(frozen=True)
class Text:
    """A text of which every token is learned; ``where`` is ``file:line``."""

    text: str
    where: str


def recognise(value: Mapping[str, Any], where: str) -> Shape:
    """Name the shape of a record by its fields; DataError when none or several fit."""
    fitting = [shape for shape, fields in FIELDS.items() if all(field in value for field in fields)]
    if len(fitting) == 1:
        return fitting[0]
    found = ", ".join(sorted(map(repr, value))) or "none"
    if fitting:
        raise DataError(
            f"the record fits several shapes: {' and '.join(fitting)} (its fields: {found})",
            where=where,
            hint=f"name the one that is meant: data.format={fitting[0]}",
        )
    hint = SHAPES_HINT
    if {"question", "answer"} <= set(value):
        hint += "\n    here: rename question to prompt and answer to completion"
    raise DataError(f"the shape of the record is not known (its fields: {found})", where=where, hint=hint)


def convert(value: Mapping[str, Any], shape: Shape, where: str) -> Conversation | Text:
    """Turn a record of the given shape into a conversation or a text; DataError when it is of another shape.

    instruction/input/output and prompt/completion become one user and one assistant message; the input follows the
    instruction after an empty line.
    """
    missing = [field for field in FIELDS[shape] if field not in value]
    if missing:
        found = ", ".join(sorted(map(repr, value))) or "none"
        raise DataError(f"the record is not of the shape {shape}: no {missing[0]!r} (its fields: {found})", where=where)
    _refuse(value, CHANGES_A_RECORD, "the record", where)
    if shape == "messages":
        return _conversation(value["messages"], "role", "content", where)
    if shape == "conversations":
        return _conversation(value["conversations"], "from", "value", where)
    if shape == "text":
        text = _string(value["text"], "text", where)
        if not text.strip():
            raise DataError("'text' is empty", where=where)
        return Text(text, where)
    prompt_field, answer_field = FIELDS[shape]
    prompt = _string(value[prompt_field], prompt_field, where)
    if shape == "instruction" and value.get("input"):
        prompt += "\n\n" + _string(value["input"], "input", where)
    answer = _string(value[answer_field], answer_field, where)
    if not answer.strip():
        raise DataError(f"{answer_field!r} is empty: there is nothing to learn from it", where=where)
    return Conversation((Message("user", prompt), Message("assistant", answer)), where)


def ignored_fields(value: Mapping[str, Any], shape: Shape) -> set[str]:
    """Name the fields of a record that play no part."""
    used = set(FIELDS[shape]) | ({"input"} if shape == "instruction" else set())
    return set(value) - used


def content_share(record: Conversation | Text) -> float:
    """Map a record's content to a number in [0, 1) that depends on nothing else: equal content, equal number."""
    content = (
        [record.text] if isinstance(record, Text) else [[message.role, message.content] for message in record.messages]
    )
    digest = hashlib.sha256(orjson.dumps(content)).digest()
    # 53 bits, the size of a float's mantissa: with 64 the division could round up to 1.0.
    return float((int.from_bytes(digest[:8], "big") >> 11) / 2**53)


def _conversation(turns: Any, role_field: str, text_field: str, where: str) -> Conversation:
    if not isinstance(turns, list) or not turns:
        raise DataError(f"the list of messages is {_kind(turns)}; at least one message is needed", where=where)
    messages = tuple(_message(turn, i + 1, role_field, text_field, where) for i, turn in enumerate(turns))
    if all(message.role != "assistant" for message in messages):
        roles = ", ".join(message.role for message in messages)
        raise DataError(f"no assistant message: there is nothing to learn (roles: {roles})", where=where)
    return Conversation(messages, where)


def _message(turn: Any, number: int, role_field: str, text_field: str, where: str) -> Message:
    if not isinstance(turn, dict):
        raise DataError(f"message {number} is {_kind(turn)}, not an object", where=where)
    for field in (role_field, text_field):
        if field not in turn:
            found = ", ".join(sorted(map(repr, turn))) or "none"
            raise DataError(f"message {number} has no {field!r} (its fields: {found})", where=where)
    _refuse(turn, CHANGES_A_MESSAGE, f"message {number}", where)
    role = turn[role_field]
    if not isinstance(role, str) or role not in ROLES:
        known = ", ".join(ROLES)
        raise DataError(f"message {number} has the role {role!r}; the roles understood are {known}", where=where)
    content = _string(turn[text_field], text_field, where, f"message {number}: ")
    if ROLES[role] == "assistant" and not content.strip():
        raise DataError(f"message {number} is an empty assistant answer: nothing to learn from it", where=where)
    return Message(ROLES[role], content)


def _refuse(value: Mapping[str, Any], names: tuple[str, ...], what: str, where: str) -> None:
    present = [name for name in names if value.get(name) not in (None, "", [], {})]
    if present:
        raise DataError(
            f"{what} has {present[0]!r}, which would change what is learned and is not supported", where=where
        )


def _string(value: Any, field: str, where: str, what: str = "") -> str:
    if not isinstance(value, str):
        raise DataError(f"{what}{field!r} is {_kind(value)}, not a text", where=where)
    return value


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "true or false", int: "a number", float: "a number", list: "a list"}
    if value == [] or value == "":
        return "empty"
    return names.get(cast(type, type(value)), "an object" if isinstance(value, dict) else "a text")
