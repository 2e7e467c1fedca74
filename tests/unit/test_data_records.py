"""Shapes: recognised, converted, or refused with what was found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data.records import Conversation, Message, Shape, Text, content_share, convert, ignored_fields, recognise
from unisono.data.turns import ROLES
from unisono.errors import DataError

USER, ANSWER = Message("user", "hi"), Message("assistant", "yes")
SAMPLES: dict[Shape, dict[str, Any]] = {
    "messages": {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]},
    "conversations": {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
    "instruction": {"instruction": "hi", "input": "", "output": "yes"},
    "prompt_completion": {"prompt": "hi", "completion": "yes"},
}


@pytest.mark.parametrize("shape", SAMPLES)
def test_each_shape_is_recognised_and_becomes_the_same_conversation(shape: Shape) -> None:
    assert recognise(SAMPLES[shape], "a:1") == shape
    assert convert(SAMPLES[shape], shape, "a:1") == Conversation((USER, ANSWER), "a:1")


def test_text_and_input() -> None:
    assert recognise({"text": "x", "id": 3}, "a:1") == "text"
    assert convert({"text": "x"}, "text", "a:1") == Text("x", "a:1")
    record = convert({"instruction": "Add.", "input": "1, 2", "output": "3"}, "instruction", "a:1")
    assert isinstance(record, Conversation) and record.messages[0].content == "Add.\n\n1, 2"
    assert recognise({"instruction": "a", "output": "b"}, "a:1") == "instruction"


def test_an_unknown_shape_lists_the_five_and_what_was_found() -> None:
    with pytest.raises(DataError) as caught:
        recognise({"question": "a", "answer": "b"}, "a.jsonl:1")
    text = str(caught.value)
    assert text.startswith("a.jsonl:1: ") and "'answer', 'question'" in text
    for field in ("messages", "conversations", "instruction", "prompt", "text"):
        assert f'"{field}"' in text
    assert "data.fields={prompt: question, completion: answer}" in text


def test_fields_may_have_other_names() -> None:
    fields = {"prompt": "question", "completion": "answer"}
    value = {"question": "hi", "answer": "yes", "prompt": 1}
    assert recognise(value, "a:1", fields) == "prompt_completion"
    assert convert(value, "prompt_completion", "a:1", fields) == Conversation((USER, ANSWER), "a:1")
    assert ignored_fields(value, "prompt_completion", fields) == {"prompt"}
    with pytest.raises(DataError, match="no 'answer'"):
        convert({"prompt": "hi", "completion": "yes", "question": "hi"}, "prompt_completion", "a:1", fields)
    turns = {"chat": [{"who": "user", "content": "hi"}, {"who": "assistant", "content": "yes"}], "functions": []}
    named = {"messages": "chat", "role": "who", "tools": "functions"}
    assert convert(turns, "messages", "a:1", named) == Conversation((USER, ANSWER), "a:1")
    assert ignored_fields(turns, "messages", named) == set()


def test_tool_calls_take_one_form() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for tools in ([tool], [tool["function"]], json.dumps([tool]), [json.dumps(tool)]):
        for form in (call, call["function"], {"function": {"name": "f", "arguments": '{"a": [1]}'}}):
            value = _turns({"role": "assistant", "content": None, "tool_calls": [form]}) | {"tools": tools}
            record = convert(value, "messages", "a:1")
            assert isinstance(record, Conversation)
            assert record.messages[1] == Message("assistant", "", tool_calls=(call,)) and record.tools == (tool,)
    turns = [
        {"from": "human", "value": "hi"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": [1]}}'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "yes"},
    ]
    record = convert({"conversations": turns}, "conversations", "a:1")
    assert isinstance(record, Conversation)
    expected = (USER, Message("assistant", "", tool_calls=(call,)), Message("tool", "2"), ANSWER)
    assert record.messages == expected
    assert Message("tool", "2", name="f", tool_call_id="7").as_dict() == {
        "role": "tool",
        "content": "2",
        "name": "f",
        "tool_call_id": "7",
    }


def test_what_a_message_says_of_its_training() -> None:
    for said, train in (
        ({"train": False}, False),
        ({"weight": 0}, False),
        ({"weight": 1}, True),
        ({"train": None}, None),
    ):
        record = convert(_turns({"role": "assistant", "content": "yes", **said}), "messages", "a:1")
        assert isinstance(record, Conversation) and record.messages[1].train is train


def test_two_fitting_shapes_are_not_guessed() -> None:
    with pytest.raises(DataError, match=r"instruction and text[\s\S]*data\.format="):
        recognise({"instruction": "a", "output": "b", "text": "c"}, "a:1")


def _turns(*turns: object) -> dict[str, Any]:
    return {"messages": [USER.__dict__, *turns]}


def _call(arguments: object = "{}") -> dict[str, Any]:
    return {"function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("shape", "value", "reason"),
    [
        ("messages", {"text": "x"}, "not of the shape messages"),
        ("messages", {"messages": []}, "empty"),
        ("messages", {"messages": None}, "null"),
        ("messages", _turns(), "no assistant message"),
        ("messages", _turns("x"), "message 2 is a text"),
        ("messages", _turns({"role": "assistant"}), "no 'content'"),
        ("messages", _turns({"role": "assistant", "content": None}), "null, not a text"),
        ("messages", _turns({"role": "assistant", "content": [{"type": "text"}]}), "a list, not a text"),
        ("messages", _turns({"role": "assistant", "content": " \n"}), "message 2 is an empty assistant answer"),
        ("messages", _turns({"role": "robot", "content": "x"}), "role 'robot'"),
        ("messages", _turns({"role": ["x"], "content": "x"}), "role"),
        ("messages", _turns({"role": "assistant", "content": "x", "tool_calls": [1]}), "tool call 1 names no function"),
        ("messages", {**_turns({"role": "assistant", "content": "x"}), "tools": [3]}, "tool 1 names no function"),
        ("messages", {**_turns({"role": "assistant", "content": "x"}), "tools": "{"}, "'tools' is a text that is not"),
        ("messages", {**_turns({"role": "assistant", "content": "x"}), "images": ["t"]}, "'images'"),
        ("prompt_completion", {"prompt": "x", "completion": "y", "tools": [1]}, "'tools'"),
        ("messages", _turns({"role": "assistant", "content": None, "tool_calls": None}), "null, not a text"),
        ("messages", _turns({"role": "assistant", "tool_calls": [_call("[1]")]}), "'arguments' is a list"),
        ("messages", _turns({"role": "assistant", "tool_calls": [_call("{")]}), "'arguments' is a text that is not"),
        ("messages", _turns({"role": "user", "content": "x", "tool_calls": [_call()]}), "its role is 'user'"),
        ("messages", _turns({"role": "user", "content": "x", "reasoning": "y"}), "'reasoning', but its role is"),
        ("messages", _turns({"role": "assistant", "content": "x", "reasoning": "a", "thinking": "b"}), "different"),
        ("messages", _turns({"role": "user", "content": "x", "train": True}), "only the assistant's"),
        ("messages", _turns({"role": "assistant", "content": "x", "train": "no"}), "not true or false"),
        ("messages", _turns({"role": "assistant", "content": "x", "weight": 0.5}), "'weight' is 0.5"),
        ("messages", _turns({"role": "assistant", "content": "x", "weight": 0, "train": True}), "but 'weight' is 0"),
        ("instruction", {"instruction": "x", "output": ""}, "'output' is empty"),
        ("instruction", {"instruction": 5, "output": "x"}, "a number, not a text"),
        ("prompt_completion", {"prompt": "x", "completion": "  "}, "'completion' is empty"),
        ("text", {"text": " "}, "'text' is empty"),
    ],
)
def test_bad_records_say_what_was_found(shape: Shape, value: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason) as caught:
        convert(value, shape, "a.jsonl:7")
    assert caught.value.where == "a.jsonl:7"


def test_fields_without_a_part_are_named() -> None:
    assert ignored_fields({"prompt": "a", "completion": "b", "id": 1}, "prompt_completion") == {"id"}
    assert ignored_fields(SAMPLES["instruction"], "instruction") == set()


def test_the_share_depends_on_content_alone() -> None:
    record = Conversation((USER, ANSWER), "a:1")
    assert content_share(record) == content_share(Conversation((USER, ANSWER), "b:2"))
    shares = [content_share(Text(str(i), "")) for i in range(2000)]
    assert all(0 <= share < 1 for share in shares)
    assert abs(sum(share < 0.2 for share in shares) / 2000 - 0.2) < 0.03
    assert content_share(record) == 0.9192740701067416, "stores depend on it"
    thought = Conversation((USER, Message("assistant", "yes", reasoning="so")), "a:1")
    assert len({content_share(x) for x in (record, thought, Conversation(record.messages, "", ({"name": "f"},)))}) == 3
    assert content_share(Text("a", "")) != content_share(Text("b", ""))


_scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-1, 2), st.sampled_from(["", " ", "x", "{}", "[]", '{"name":"f"}'])
)
_json = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                [
                    "role",
                    "content",
                    "from",
                    "value",
                    "tool_calls",
                    "function",
                    "name",
                    "arguments",
                    "train",
                    "weight",
                    "id",
                ]
            ),
            inner,
            max_size=6,
        ),
    ),
    max_leaves=12,
)
_turn = st.fixed_dictionaries(
    {"role": st.sampled_from([*ROLES, "robot"]), "content": _json},
    optional=dict.fromkeys(("tool_calls", "reasoning", "thinking", "train", "weight", "name", "tool_call_id"), _json),
)


@settings(max_examples=300, deadline=None)
@given(turns=st.lists(st.one_of(_turn, _json), max_size=3), tools=_json)
def test_any_record_is_converted_or_refused_by_name(turns: list[Any], tools: Any) -> None:
    try:
        record = convert({"messages": turns, "tools": tools}, "messages", "a:1")
    except DataError:
        return
    assert isinstance(record, Conversation)
    assert 0 <= content_share(record) < 1
    for message in record.messages:
        assert isinstance(message.content, str) and isinstance(message.reasoning, str)
        assert all(isinstance(call["function"]["arguments"], dict) for call in message.tool_calls)
        json.dumps(message.as_dict())


def test_the_lines_shown_in_the_documentation_are_records() -> None:
    text = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.partition("```jsonl\n")[2].partition("```")[0].splitlines()]
    shapes = [recognise(line, "docs") for line in lines]
    assert shapes == ["messages"] * 4 + ["conversations", "instruction", "prompt_completion", "text"]
    records = [convert(line, shape, "docs") for line, shape in zip(lines, shapes)]
    assert isinstance(records[1], Conversation) and records[1].messages[1].train is False
    assert isinstance(records[3], Conversation) and records[3].tools and records[3].messages[1].tool_calls
