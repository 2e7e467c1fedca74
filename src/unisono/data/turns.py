"""One turn of a conversation, from the forms in which files have it: chat lists, ShareGPT, OpenAI's tool calls.

Understood: the roles below, tool calls in OpenAI's form (``function.arguments`` as an object or as JSON in a string),
bare calls and tools (``{"name", "arguments"}``), reasoning under three names, ``train: false`` and OpenAI's
``weight``. Everything is brought into the form that serving hands to a chat template: arguments and tool definitions
are objects, a missing text beside tool calls is an empty one. What would change the meaning and is not understood
(images, OpenAI's old ``function_call``) refuses the record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import orjson

from unisono.errors import DataError

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
REASONING = ("reasoning_content", "reasoning", "thinking")
CHANGES_A_MESSAGE = ("function_call", "images", "audio")


@dataclass(frozen=True)
class Message:
    """One turn: who speaks, and what.

    reasoning: what the assistant thought before it spoke. tool_calls: OpenAI's form, arguments as objects. name,
    tool_call_id: of a tool's message. train: what the file says of this turn; None = nothing.
    """

    role: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    name: str = ""
    tool_call_id: str = ""
    train: bool | None = None

    @property
    def is_plain(self) -> bool:
        """Tell whether role and text are all there is to it."""
        return not (self.reasoning or self.tool_calls or self.name or self.tool_call_id)

    def as_dict(self) -> dict[str, Any]:
        """Give the form that chat templates take: fields that are not there are left out."""
        form: dict[str, Any] = {"role": self.role, "content": self.content}
        if not self.is_plain:
            more = {"reasoning_content": self.reasoning, "tool_calls": list(self.tool_calls)}
            more |= {"name": self.name, "tool_call_id": self.tool_call_id}
            form |= {field: value for field, value in more.items() if value}
        return form


def read_message(turn: Any, number: int, role_field: str, text_field: str, where: str) -> Message:
    """Turn one entry of a list of messages into a message; DataError when it is none."""
    what = f"message {number}"
    if not isinstance(turn, dict):
        raise DataError(f"{what} is {kind_of(turn)}, not an object", where=where)
    spoken = turn.get(role_field)
    role = ROLES.get(spoken) if isinstance(spoken, str) else None
    text = turn.get(text_field)
    if len(turn) == 2 and role is not None and isinstance(text, str) and spoken != "function_call":
        _refuse_empty(role, text, what, where)
        return Message(role, text)
    if role_field not in turn:
        raise DataError(f"{what} has no {role_field!r} (its fields: {names_of(turn)})", where=where)
    if role is None:
        raise DataError(f"{what} has the role {spoken!r}; the roles understood are {', '.join(ROLES)}", where=where)
    refuse_fields(turn, CHANGES_A_MESSAGE, what, where)
    reasoning = _reasoning(turn, role, what, where)
    train = _train(turn, role, what, where)
    if spoken == "function_call":
        calls = _calls(_parsed(text, f"{what}: {text_field!r}", where), role, what, where)
        return Message(role, "", reasoning, calls, train=train)
    calls = _calls(turn.get("tool_calls"), role, what, where)
    if text is None and calls:
        text = ""
    elif text_field not in turn:
        raise DataError(f"{what} has no {text_field!r} (its fields: {names_of(turn)})", where=where)
    text = string(text, text_field, where, f"{what}: ")
    if not calls:
        _refuse_empty(role, text, what, where)
    elif not text.strip():
        text = ""
    if role != "tool":
        return Message(role, text, reasoning, calls, train=train)
    name, call_id = (string(turn.get(field) or "", field, where, f"{what}: ") for field in ("name", "tool_call_id"))
    return Message(role, text, name=name, tool_call_id=call_id, train=train)


def read_tools(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    """Read tool definitions: a list, or JSON of a list in a string. Bare ones get OpenAI's wrapping, as in serving."""
    tools = _parsed(value, "'tools'", where) if value else []
    if not isinstance(tools, list):
        raise DataError(f"'tools' is {kind_of(tools)}, not a list", where=where)
    return tuple(_wrapped(tool, f"tool {number}", where) for number, tool in enumerate(tools, 1))


def _wrapped(value: Any, what: str, where: str) -> dict[str, Any]:
    """Bring a call or a definition into the form ``{"type": "function", "function": {"name": ...}}``."""
    value = _parsed(value, what, where)
    form = value if isinstance(value, dict) and "function" in value else {"function": value}
    function = form["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise DataError(
            f"{what} names no function",
            where=where,
            hint='the form is {"type": "function", "function": {"name": "...", ...}}',
        )
    return {"type": "function", **form}


def _calls(value: Any, role: str, what: str, where: str) -> tuple[Mapping[str, Any], ...]:
    if not value:
        return ()
    if role != "assistant":
        raise DataError(f"{what} has 'tool_calls', but its role is {role!r}", where=where)
    calls = value if isinstance(value, list) else [value]
    return tuple(_call(call, f"{what}: tool call {number}", where) for number, call in enumerate(calls, 1))


def _call(value: Any, what: str, where: str) -> dict[str, Any]:
    call = _wrapped(value, what, where)
    arguments = _parsed(call["function"].get("arguments") or {}, f"{what}: 'arguments'", where)
    if not isinstance(arguments, dict):
        raise DataError(f"{what}: 'arguments' is {kind_of(arguments)}, not an object", where=where)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _parsed(value: Any, what: str, where: str) -> Any:
    """Read JSON that stands in a string; other values are taken as they are."""
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{what} is a text that is not valid JSON: {error}", where=where) from error


def _reasoning(turn: Mapping[str, Any], role: str, what: str, where: str) -> str:
    given = [(name, turn[name]) for name in REASONING if turn.get(name) not in (None, "")]
    if not given:
        return ""
    if role != "assistant":
        raise DataError(f"{what} has {given[0][0]!r}, but its role is {role!r}", where=where)
    texts = {string(text, name, where, f"{what}: ") for name, text in given}
    if len(texts) > 1:
        raise DataError(f"{what} has different texts in {' and '.join(name for name, _ in given)}", where=where)
    return texts.pop()


def _train(turn: Mapping[str, Any], role: str, what: str, where: str) -> bool | None:
    """Read ``train`` (true or false) and ``weight`` (1 or 0); None when neither says anything."""
    train, weight = turn.get("train"), turn.get("weight")
    if train is not None and not isinstance(train, bool):
        raise DataError(f"{what}: 'train' is {kind_of(train)}, not true or false", where=where)
    if weight is not None:
        if isinstance(weight, bool) or weight not in (0, 1):
            raise DataError(f"{what}: 'weight' is {weight!r}; 0 and 1 are understood", where=where)
        if train is not None and train != bool(weight):
            raise DataError(f"{what}: 'train' is {train} but 'weight' is {weight}", where=where)
        train = bool(weight)
    if train and role != "assistant":
        raise DataError(
            f"{what} is to be learned, but its role is {role!r}; only the assistant's messages can be",
            where=where,
            hint="data.targets=all learns every token",
        )
    return train


def _refuse_empty(role: str, text: str, what: str, where: str) -> None:
    if role == "assistant" and not text.strip():
        raise DataError(f"{what} is an empty assistant answer: nothing to learn from it", where=where)


def refuse_fields(value: Mapping[str, Any], names: tuple[str, ...], what: str, where: str) -> None:
    """Refuse what has a field that is not understood and would change what is learned."""
    present = [name for name in names if name in value and value[name] not in (None, "", [], {})]
    if present:
        raise DataError(
            f"{what} has {present[0]!r}, which would change what is learned and is not supported", where=where
        )


def string(value: Any, field: str, where: str, what: str = "") -> str:
    """Return a value that must be a text."""
    if not isinstance(value, str):
        raise DataError(f"{what}{field!r} is {kind_of(value)}, not a text", where=where)
    return value


def names_of(value: Mapping[str, Any]) -> str:
    """List the fields of an object."""
    return ", ".join(sorted(map(repr, value))) or "none"


def kind_of(value: Any) -> str:
    """Say in plain words what kind of JSON value this is."""
    names = {type(None): "null", bool: "true or false", int: "a number", float: "a number", list: "a list"}
    if value == [] or value == "":
        return "empty"
    return names.get(cast(type, type(value)), "an object" if isinstance(value, dict) else "a text")
