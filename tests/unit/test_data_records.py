"""Shapes: recognised, converted, or refused with what was found."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.data.records import Conversation, Message, Shape, Text, content_share, convert, ignored_fields, recognise
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
    assert "rename question to prompt" in text


def test_two_fitting_shapes_are_not_guessed() -> None:
    with pytest.raises(DataError, match=r"instruction and text[\s\S]*data\.format="):
        recognise({"instruction": "a", "output": "b", "text": "c"}, "a:1")


def _turns(*turns: object) -> dict[str, Any]:
    return {"messages": [USER.__dict__, *turns]}


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
        ("messages", _turns({"role": "assistant", "content": "x", "tool_calls": [1]}), "tool_calls"),
        ("messages", {**_turns({"role": "assistant", "content": "x"}), "tools": ["t"]}, "'tools'"),
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
    assert content_share(Text("a", "")) != content_share(Text("b", ""))
