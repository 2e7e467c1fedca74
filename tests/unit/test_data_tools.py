"""Tool calls and reasoning in the manner of known templates: what is learned is what the model must say, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.tiny import CHATML, save_tokenizer
from unisono.data.encode import Encoder, Targets, Tokens
from unisono.data.records import Conversation, convert
from unisono.errors import DataError

_HEAD = "{% if tools %}<bos>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<eos>\n{% endif %}"
_ASK = "{% if add_generation_prompt %}<bos>assistant\n{% endif %}"
# Calls in tags, answers of tools inside a user's turn; no reasoning.
HERMES = (
    _HEAD + "{% for m in messages %}{% if m.role == 'tool' %}<bos>user\n<tool_response>{{ m.content }}</tool_response>"
    "{% else %}<bos>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}{{ '\n<tool_call>' }}"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}{% endif %}"
    "<eos>\n{% endfor %}" + _ASK
)
# Reasoning is kept behind the last question only; the last turn has a block even without reasoning.
QWEN = (
    _HEAD + "{% set ns = namespace(q=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.q = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}<bos>assistant\n"
    "{% set r = m.reasoning_content or '' %}{% set c = m.content %}"
    "{% if not r and '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.q and (loop.last or r) %}<think>\n{{ r.strip('\n') }}\n</think>\n\n{% endif %}{{ c }}"
    "{% for c in m.tool_calls or [] %}{% if not loop.first or m.content %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<eos>\n"
    "{% else %}<bos>{{ m.role }}\n{{ m.content }}<eos>\n{% endif %}{% endfor %}" + _ASK
)
# Reasoning is cut out of every turn, and asking for an answer opens it.
DEEPSEEK = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<A>{{ m.content.split('</think>')[-1] }}<eos>"
    "{% else %}<U>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<A><think>\n{% endif %}"
)
# One call, as bare JSON, closed by another token than a text; a text beside it is not rendered.
LLAMA = (
    _HEAD + "{% for m in messages %}<bos>{{ 'ipython' if m.role == 'tool' else m.role }}\n\n"
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}"
    '{% set f = m.tool_calls[0].function %}{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}<pad>'
    "{% else %}{{ m.content | trim }}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant\n\n{% endif %}"
)
# Tools stand before the last question; nothing asks for an answer.
MISTRAL = (
    "<bos>{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% if tools and m == users[-1] %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}"
    "[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]"
    "{% elif m.tool_calls %}[CALLS][{% for c in m.tool_calls %}{{ ', ' if not loop.first }}"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}{% endfor %}]<eos>"
    "{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def call(name: str = "add", **arguments: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments or {"a": 1}}}


USER = {"role": "user", "content": "1+1?"}
CALL = {"role": "assistant", "content": None, "tool_calls": [call()]}
RESULT = {"role": "tool", "content": "2"}
ANSWER = {"role": "assistant", "content": "It is 2"}
AGAIN = {"role": "user", "content": "sure? It is 2"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tools")


def learned(
    folder: Path, template: str, *turns: dict[str, Any], targets: Targets = "assistant", tools: Any = None
) -> list[str]:
    """Return what is learned, run by run; ids must be those that serving has."""
    from transformers import AutoTokenizer

    place = folder / str(abs(hash(template)))
    tokenizer = AutoTokenizer.from_pretrained(
        place if place.exists() else save_tokenizer(place, chat_template=template)
    )
    record = convert({"messages": list(turns), "tools": tools}, "messages", "t.jsonl:3")
    assert isinstance(record, Conversation)
    (result,) = Encoder(tokenizer, "messages", 10_000, targets=targets).encode([record])
    if isinstance(result, DataError):
        raise result
    assert isinstance(result, tuple)
    (tokens,) = result
    chat = [message.as_dict() for message in record.messages]
    theirs = tokenizer.apply_chat_template(chat, tools=list(record.tools) or None, return_dict=True)["input_ids"]
    assert tokens.ids.tolist() == theirs
    return runs(tokenizer, tokens)


def runs(tokenizer: Any, tokens: Tokens) -> list[str]:
    borders = np.flatnonzero(np.diff(tokens.is_target)) + 1
    pieces = zip(np.split(tokens.ids, borders), np.split(tokens.is_target, borders))
    return [tokenizer.decode(ids.tolist()) for ids, flags in pieces if flags[0]]


HERMES_CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><eos>'
QWEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><eos>'


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (HERMES, "\n" + HERMES_CALL),
        (QWEN, QWEN_CALL),
        (LLAMA, '{"name": "add", "parameters": {"a": 1}}<pad>'),
        (MISTRAL, '[CALLS][{"name": "add", "arguments": {"a": 1}}]<eos>'),
    ],
    ids=["hermes", "qwen", "llama", "mistral"],
)
def test_b19_a_tool_call_is_learned_whole_and_its_result_is_not(folder: Path, template: str, expected: str) -> None:
    assert learned(folder, template, USER, CALL, RESULT, ANSWER, tools=TOOLS) == [expected, "It is 2<eos>"]
    assert learned(folder, template, USER, CALL, RESULT, ANSWER, tools=TOOLS, targets="last") == ["It is 2<eos>"]


def test_a_call_that_ends_the_conversation(folder: Path) -> None:
    assert learned(folder, HERMES, USER, CALL, tools=TOOLS) == ["\n" + HERMES_CALL]
    assert learned(folder, QWEN, USER, CALL, tools=TOOLS) == ["<think>\n\n</think>\n\n" + QWEN_CALL]


def test_text_before_calls_and_several_calls(folder: Path) -> None:
    turn = {**CALL, "content": "Let me see.", "tool_calls": [call(), call("sub", x="</tool_call><eos> add")]}
    second = '{"name": "sub", "arguments": {"x": "</tool_call><eos> add"}}'
    expected = f"Let me see.\n{HERMES_CALL[:-5]}\n<tool_call>{second}</tool_call><eos>"
    assert learned(folder, HERMES, USER, turn, RESULT, ANSWER, tools=TOOLS) == [expected, "It is 2<eos>"]
    with pytest.raises(DataError, match=r"t\.jsonl:3: .*one call only"):
        learned(folder, LLAMA, USER, turn, RESULT, ANSWER)
    with pytest.raises(DataError, match="exactly once and as it is"):  # the text would be lost
        learned(folder, LLAMA, USER, {**CALL, "content": "Let me see."}, RESULT, ANSWER)


def test_a_template_that_knows_no_tools_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"leaves a tool call of assistant message 2 out[\s\S]*hint"):
        learned(folder, CHATML, USER, CALL, RESULT, ANSWER)
    with pytest.raises(DataError, match="leaves the tool definitions out"):
        learned(folder, CHATML, USER, ANSWER, tools=TOOLS)


def test_tools_that_move_are_refused_with_the_way_out(folder: Path) -> None:
    turns = (USER, CALL, RESULT, ANSWER, AGAIN, ANSWER)
    with pytest.raises(DataError, match=r"message 2 begins cannot be told[\s\S]*data\.targets=last"):
        learned(folder, MISTRAL, *turns, tools=TOOLS)
    assert learned(folder, MISTRAL, *turns, tools=TOOLS, targets="last") == ["It is 2<eos>"]


def test_reasoning_is_learned_where_it_is_rendered(folder: Path) -> None:
    thinking = {**ANSWER, "reasoning": "one and one\n"}
    assert learned(folder, QWEN, USER, thinking) == ["<think>\none and one\n</think>\n\nIt is 2<eos>"]
    expected = [f"<think>\nI add\n</think>\n\n{QWEN_CALL}", "<think>\none and one\n</think>\n\nIt is 2<eos>"]
    turns = (USER, {**CALL, "thinking": "I add"}, RESULT, thinking)
    assert learned(folder, QWEN, *turns, tools=TOOLS) == expected
    assert learned(folder, QWEN, *turns, tools=TOOLS, targets="last") == expected[1:]


@pytest.mark.parametrize(
    "thinking",
    [
        {"role": "assistant", "content": "2", "reasoning_content": "2"},
        {"role": "assistant", "content": "<think>2</think>2"},
    ],
    ids=["field", "inside"],
)
def test_b19_reasoning_dropped_from_an_earlier_turn_is_refused_or_not_learned(
    folder: Path, thinking: dict[str, Any]
) -> None:
    turns = (USER, thinking, AGAIN, thinking)
    with pytest.raises(DataError, match=r"message 2[\s\S]*hint[\s\S]*data\.targets=last"):
        learned(folder, QWEN, *turns)
    assert learned(folder, QWEN, *turns, targets="last") == ["<think>\n2\n</think>\n\n2<eos>"]
    assert learned(folder, QWEN, USER, {**thinking, "train": False}, AGAIN, thinking) == [
        "<think>\n2\n</think>\n\n2<eos>"
    ]


def test_reasoning_that_a_template_never_renders_is_refused(folder: Path) -> None:
    for template in (DEEPSEEK, CHATML):
        with pytest.raises(DataError, match=r"leaves the reasoning of assistant message 2 out[\s\S]*hint"):
            learned(folder, template, USER, {**ANSWER, "reasoning": "because"})
    with pytest.raises(DataError, match="leaves the reasoning of assistant message 2 out"):
        learned(folder, DEEPSEEK, USER, {"role": "assistant", "content": "<think>because</think>2"})
    assert learned(folder, DEEPSEEK, USER, ANSWER) == ["It is 2<eos>"]


def test_train_and_targets(folder: Path) -> None:
    quiet = {**ANSWER, "train": False}
    last = {"role": "assistant", "content": "yes", "weight": 1}
    assert learned(folder, CHATML, USER, quiet, AGAIN, last) == ["yes<eos>"]
    assert learned(folder, CHATML, USER, ANSWER, AGAIN, {**last, "weight": 0}, targets="last") == []
    assert learned(folder, CHATML, USER, quiet) == []
    (everything,) = learned(folder, CHATML, USER, ANSWER, AGAIN, last, targets="all")
    assert everything.startswith("user\n1+1?<eos>") and everything.endswith("yes<eos>\n")
    with pytest.raises(DataError, match=r"message 2 is not to be learned[\s\S]*data\.targets=assistant"):
        learned(folder, CHATML, USER, quiet, targets="all")
