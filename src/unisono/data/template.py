"""Where the assistant's texts stand in a rendered chat: measured, never guessed.

The conversation is rendered by the tokenizer's own chat template. The targets are the assistant's texts, each with its
end marker, and nothing else. Where a text stands is not searched for:

1. Roles and texts alone: the template is asked once per sequence of roles what it writes around the texts. Where those
   pieces with this record's texts between them are this record's rendering, character for character, every text
   stands where it was put. Otherwise the record is measured by itself:
2. The conversation is rendered a second time with a mark put behind each assistant text (and reasoning, and function
   name of a tool call). The template moves the marks along. If every mark comes out exactly once, and taking the marks
   out gives the first rendering character for character, then a mark's place is the end of its text; and the text must
   stand right before it. A template that drops, rewrites or doubles an assistant text fails one of the two, and the
   record is refused. White space that the template itself cuts off the outside of a text is no part of it.
3. Reasoning, and tool calls without a text, begin where the rendering ends that asks the model to speak: what precedes
   the answer, with the generation prompt. It must be the beginning of the whole rendering, or the record is refused.
4. The end marker is what the template writes behind an assistant text that *ends* a conversation, up to and including
   the first special token (without one: all that is not white space). An answer in the middle has it only when the
   same characters follow there too. So the opening of the next turn is never taken for an end marker, and a template
   that closes the last turn only gives earlier answers no marker. Tool calls end with what stands behind the last
   function name in the rendering that ends with their message; the same characters must follow in the whole rendering.
   A record in which no answer has an end marker is refused: the model would never learn to stop.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from unisono.data.records import Conversation, Message
from unisono.data.render import NamedRefusal, Renderer
from unisono.errors import DataError, ModelError

_MARK = "Unisono{:05d}Mark"
_ANY_MARK = re.compile(r"Unisono(\d{5})Mark")
_WIDTH = len(_MARK.format(0))
# What templates cut off the end of a message: nothing, all white space, newlines.
_CUTS: tuple[Callable[[str], str], ...] = (str, str.rstrip, lambda text: text.rstrip("\n"))
LAST_HINT = (
    "data.targets=last learns the last answer only, and earlier ones are context; "
    "or give each such answer a record of its own that ends with it"
)

Span = tuple[int, int, int]


@dataclass(frozen=True)
class Layout:
    """A rendering and, for each learned answer, its characters: first, end of the text, end with the end marker.

    kind: the roles, and whether there is more than roles and texts. is_cut: the beginning is missing.
    """

    text: str
    spans: Sequence[Span]
    kind: tuple[str, ...] = ()
    is_cut: bool = False


@dataclass(frozen=True)
class _Places:
    """Where the marks of the answers stand: ends of texts, reasonings and function names, by message."""

    cut: Callable[[str], str]
    content: dict[int, int]
    reasoning: dict[int, int]
    calls: dict[int, list[int]]


@dataclass(frozen=True)
class _Frame:
    """What a template writes around the texts of a sequence of roles; ends of the texts' end markers by message."""

    pieces: list[str]
    markers: dict[int, str]


class ChatTemplate:
    """A tokenizer's chat template, with the places of what it lets the assistant say."""

    def __init__(self, tokenizer: Any) -> None:
        self.render = Renderer(tokenizer)
        added = sorted((token for token in tokenizer.get_added_vocab() if token.strip()), key=len, reverse=True)
        self._added_token = re.compile("|".join(map(re.escape, added))) if added else None
        self._frames: dict[tuple[str, ...], _Frame | None] = {}
        self._closings: dict[Hashable, tuple[str, str]] = {}
        self._shows_tools: set[Hashable] = set()

    def lay_out(self, record: Conversation, learned: Sequence[int], *, measured: bool = False) -> Layout:
        """Render a conversation and measure the answers of the messages ``learned``.

        measured: take step 2 at once, where step 1 would be quicker. DataError when answers cannot be told from the
        rest.
        """
        messages = record.messages
        roles = tuple([message.role for message in messages])
        if record.tools or not all(message.is_plain for message in messages):
            roles = (*roles, "more")
            text = self.render(messages, record.where, record.tools)
            self._check_tools(record, text)
        else:
            text = self.render.plain(messages, roles, record.where)
            if learned and not measured:
                spans = self._framed(messages, roles, text, learned, record.where)
                if spans is not None:
                    return Layout(text, spans, roles)
        return Layout(text, self._spans(record, text, learned) if learned else (), roles)

    def _framed(
        self, messages: Sequence[Message], roles: tuple[str, ...], text: str, learned: Sequence[int], where: str
    ) -> list[Span] | None:
        """Place the answers by step 1; None when the rendering is not the frame with the texts in it."""
        if roles not in self._frames:
            self._frames[roles] = self._frame(roles, where)
        frame = self._frames[roles]
        if frame is None:
            return None
        parts = [frame.pieces[0]]
        for message, piece in zip(messages, frame.pieces[1:]):
            parts += (message.content, piece)
        if "".join(parts) != text:
            return None
        spans = []
        place = number = 0
        for i in learned:
            place += sum(map(len, parts[number : 2 * i + 1]))
            number = 2 * i + 1
            end = place + len(parts[number])
            marker = frame.markers[i]
            spans.append((place, end, end + len(marker) if text.startswith(marker, end) else end))
        _check_closed(spans, where)
        return spans

    def _frame(self, roles: tuple[str, ...], where: str) -> _Frame | None:
        """Ask what the template writes around texts; None when it does not render each of them once and in order."""
        marks = [_MARK.format(i) for i in range(len(roles))]
        try:
            rendered = self.render([Message(role, mark) for role, mark in zip(roles, marks)], where)
            markers = {
                i: self._closing(roles[: i + 1], where)[0] for i, role in enumerate(roles) if role == "assistant"
            }
        except DataError:
            return None  # a text that is a mark may be refused where this record's is not
        if _ANY_MARK.findall(rendered) != [f"{i:05d}" for i in range(len(roles))]:
            return None
        return _Frame(re.split(r"Unisono\d{5}Mark", rendered), markers)

    def _check_tools(self, record: Conversation, text: str) -> None:
        kind = _kind(record.messages, record)
        if not record.tools or kind in self._shows_tools:
            return
        if self.render(record.messages, record.where) == text:
            raise DataError(
                "the chat template leaves the tool definitions out, so the model would not see them",
                where=record.where,
                hint="use the chat template of a model that was made for tools, or drop 'tools' from the record",
            )
        self._shows_tools.add(kind)

    def _spans(self, record: Conversation, text: str, learned: Sequence[int]) -> list[Span]:
        """Place the answers by steps 2 to 4."""
        places = self._measure(record, text, learned)
        spans = []
        for i in learned:
            span = self._call_span(record, text, i, places) if i in places.calls else None
            spans.append(span or self._text_span(record, text, i, places))
        for before, after in pairwise(spans):
            if before[2] > after[0]:
                raise _not_told_apart(record)
        _check_closed(spans, record.where)
        return spans

    def _measure(self, record: Conversation, text: str, learned: Sequence[int]) -> _Places:
        """Find where in ``text`` texts, reasonings and function names end (step 2 of the module's text)."""
        reasons = any(record.messages[i].reasoning for i in learned)
        for cut, cut_reasoning in product(_CUTS, _CUTS if reasons else _CUTS[:1]):
            marked = list(record.messages)
            owners: list[tuple[int, str]] = []
            for i in learned:
                marked[i] = _with_marks(marked[i], i, owners, cut, cut_reasoning)
            rendered = self.render(marked, record.where, record.tools)
            found = [(int(match.group(1)), match.start()) for match in _ANY_MARK.finditer(rendered)]
            if _ANY_MARK.sub("", rendered) != text:
                continue
            place = {number: start - k * _WIDTH for k, (number, start) in enumerate(found)}
            missing = [owners[number] for number in range(len(owners)) if number not in place]
            if len(place) != len(found) or any(number >= len(owners) for number in place):
                break  # doubled, or a text that looks like a mark
            if missing:
                raise self._lost(record, *missing[0])
            calls: dict[int, list[int]] = {}
            for number, (i, what) in enumerate(owners):
                if what == "call":
                    calls.setdefault(i, []).append(place[number])
            content = {i: place[k] for k, (i, what) in enumerate(owners) if what == "content"}
            reasoning = {i: place[k] for k, (i, what) in enumerate(owners) if what == "reasoning"}
            return _Places(cut, content, reasoning, calls)
        raise _not_told_apart(record)

    def _lost(self, record: Conversation, i: int, what: str) -> DataError:
        """Explain that the template leaves out something of an answer."""
        if what == "content":
            return _not_told_apart(record)
        is_last = all(message.role != "assistant" for message in record.messages[i + 1 :])
        if what == "call":
            message = f"the chat template leaves a tool call of assistant message {i + 1} out"
            hint = "use the chat template of a model that was made for tools"
        else:
            message = (
                f"the chat template leaves the reasoning of assistant message {i + 1} out, so it cannot be learned"
            )
            hint = "drop the reasoning, or use a chat template that renders reasoning_content" if is_last else LAST_HINT
        return DataError(message, where=record.where, hint=hint)

    def _text_span(self, record: Conversation, text: str, i: int, places: _Places) -> Span:
        """Place an answer without tool calls."""
        end = places.content[i]
        answer = self._without_cut_start(record, i, places.cut(record.messages[i].content), text)
        if i in places.reasoning and text.endswith(answer, 0, end):
            begin = self._prompt_end(record, text, i)
            if not begin <= places.reasoning[i] <= end - len(answer):
                raise _not_told_apart(record)
        elif text.endswith(answer, 0, end):
            begin = end - len(answer)
        else:
            begin = self._begin_of_thought(record, text, i, answer, end)
        marker = self._marker_after(record, i)[0]
        return begin, end, end + len(marker) if text.startswith(marker, end) else end

    def _begin_of_thought(self, record: Conversation, text: str, i: int, answer: str, end: int) -> int:
        """Place the beginning of an answer whose ``<think>`` block the template puts together anew."""
        thought, tag, rest = record.messages[i].content.rpartition("</think>")
        told = answer.rpartition("</think>")[2].lstrip()
        if tag and text.endswith(told, 0, end):
            mark = _MARK.format(0)
            messages = list(record.messages)
            for kept in {thought, thought.rstrip()}:
                messages[i] = replace(messages[i], content=kept + mark + tag + rest)
                rendered = self.render(messages, record.where, record.tools)
                if rendered.replace(mark, "", 1) == text and mark in rendered:
                    begin = self._prompt_end(record, text, i)
                    if begin <= rendered.index(mark) <= end - len(told):
                        return begin
            if all(message.role != "assistant" for message in record.messages[i + 1 :]):
                raise self._lost(record, i, "reasoning")
        raise DataError(
            f"the chat template changes assistant message {i + 1}, so what would be learned is not what stands "
            "in the file",
            where=record.where,
            hint="some templates cut reasoning out of all but the last answer: " + LAST_HINT,
        )

    def _call_span(self, record: Conversation, text: str, i: int, places: _Places) -> Span:
        """Place an answer with tool calls: text, calls and end marker."""
        message = record.messages[i]
        calls = places.calls[i]
        begin = -1
        if message.content and not message.reasoning:
            answer = self._without_cut_start(record, i, places.cut(message.content), text)
            if text.endswith(answer, 0, places.content[i]):
                begin = places.content[i] - len(answer)
        if not 0 <= begin <= calls[0]:
            begin = self._prompt_end(record, text, i)
        within = [*calls, *(table[i] for table in (places.content, places.reasoning) if i in table)]
        body, marker = self._tail(record, i)
        if text.startswith(body, calls[-1]):
            closed = calls[-1] + len(body)
            end = closed - len(marker)
        elif marker and text.startswith(body[: -len(marker)], calls[-1]):
            end = closed = calls[-1] + len(body) - len(marker)
        else:
            end = closed = -1
        if not begin <= min(within) <= max(within) <= end:
            raise DataError(
                f"where the tool calls of assistant message {i + 1} end cannot be told: the chat template renders them "
                "differently when nothing follows",
                where=record.where,
                hint=LAST_HINT,
            )
        return begin, end, closed

    def _tail(self, record: Conversation, i: int) -> tuple[str, str]:
        """Return what follows the last function name in a conversation that ends with it, and the end marker in it."""
        messages = list(record.messages[: i + 1])
        *calls, last = messages[i].tool_calls
        mark = _MARK.format(0)
        function = {**last["function"], "name": last["function"]["name"] + mark}
        messages[i] = replace(messages[i], tool_calls=(*calls, {**last, "function": function}))
        tail = self.render(messages, record.where, record.tools).rpartition(mark)[2]
        marker, rest = self._marker_after(record, i)
        if tail.endswith(rest):
            tail = tail[: len(tail) - len(rest)]
        elif rest.strip():
            raise _not_told_apart(record)
        else:
            tail = tail.rstrip()
        if marker and tail.endswith(marker):
            return tail, marker
        ends = [match.group() for match in self._added_token.finditer(tail)] if self._added_token else []
        return tail, ends[-1] if ends and tail.endswith(ends[-1]) else ""

    def _prompt_end(self, record: Conversation, text: str, i: int) -> int:
        """Return where the model is asked to speak (step 3); DataError when that is not how the whole begins."""
        prompt = self.render(record.messages[:i], record.where, record.tools, prompt=True) if i else ""
        if not prompt or not text.startswith(prompt):
            raise DataError(
                f"where assistant message {i + 1} begins cannot be told: the chat template renders what precedes it "
                "differently when it asks for that answer",
                where=record.where,
                hint=LAST_HINT,
            )
        return len(prompt)

    def _without_cut_start(self, record: Conversation, i: int, answer: str, text: str) -> str:
        """Drop from an answer the leading white space that the template drops: it could pass for the header's own."""
        bare = answer.lstrip()
        if bare == answer:
            return answer
        messages = list(record.messages)
        messages[i] = replace(messages[i], content=messages[i].content.lstrip())
        num_kept = len(text) - len(self.render(messages, record.where, record.tools))
        return answer[len(answer) - len(bare) - num_kept :]

    def _marker_after(self, record: Conversation, i: int) -> tuple[str, str]:
        """Return the end marker of the answer of message ``i`` and what the template writes behind it at the end."""
        if not record.tools and all(message.is_plain for message in record.messages[: i + 1]):
            return self._closing(tuple(message.role for message in record.messages[: i + 1]), record.where)
        kind = _kind(record.messages[:i], record)
        if kind not in self._closings:
            answer = Message("assistant", _MARK.format(i))
            rendered = self.render([*record.messages[:i], answer], record.where, record.tools)
            self._closings[kind] = self._split_closing(rendered, answer.content)
        return self._closings[kind]

    def _closing(self, roles: tuple[str, ...], where: str) -> tuple[str, str]:
        if roles not in self._closings:
            messages = [Message(role, _MARK.format(i)) for i, role in enumerate(roles)]
            self._closings[roles] = self._split_closing(self.render(messages, where), messages[-1].content)
        return self._closings[roles]

    def _split_closing(self, rendered: str, mark: str) -> tuple[str, str]:
        closing = rendered.partition(mark)[2]
        special = self._added_token.search(closing) if self._added_token else None
        marker = closing[: special.end()] if special else closing.rstrip()
        return marker, closing[len(marker) :]


def _kind(messages: Sequence[Message], record: Conversation) -> Hashable:
    """Name what decides how a template goes through messages: roles, fields, tools, but not the texts."""
    return bool(record.tools), *[(message.role, *message.as_dict()) for message in messages]


def _with_marks(
    message: Message,
    i: int,
    owners: list[tuple[int, str]],
    cut: Callable[[str], str],
    cut_reasoning: Callable[[str], str],
) -> Message:
    """Put a mark behind text, reasoning and every function name; ``owners`` says by number whose each mark is."""
    changes: dict[str, Any] = {}
    if message.reasoning:
        changes["reasoning"] = cut_reasoning(message.reasoning) + _MARK.format(len(owners))
        owners.append((i, "reasoning"))
    if message.content:
        changes["content"] = cut(message.content) + _MARK.format(len(owners))
        owners.append((i, "content"))
    calls = []
    for call in message.tool_calls:
        function = {**call["function"], "name": call["function"]["name"] + _MARK.format(len(owners))}
        calls.append({**call, "function": function})
        owners.append((i, "call"))
    return replace(message, **changes, tool_calls=tuple(calls))


def _check_closed(spans: Sequence[Span], where: str) -> None:
    for _, end, closed in spans:
        if end != closed:
            return
    raise DataError(
        "the chat template puts no end marker after any answer: the model would not learn to stop",
        where=where,
        hint="let the chat template end each assistant message with the end token",
    )


def _not_told_apart(record: Conversation) -> DataError:
    return DataError(
        "the chat template does not render every assistant message exactly once and as it is, "
        "so what is to be learned cannot be told from the rest",
        where=record.where,
        hint=LAST_HINT if sum(message.role == "assistant" for message in record.messages) > 1 else None,
    )


def load_tokenizer(folder: Path, *, trust_remote_code: bool) -> Any:
    """Load the tokenizer of a model folder; ModelError when there is none."""
    from transformers import AutoTokenizer

    try:
        with NamedRefusal("the tokenizer cannot be loaded", str(folder)):
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, LookupError, TypeError) as error:  # the last two: files that lack what they must hold
        raise ModelError(f"the tokenizer cannot be loaded: {error!r}", where=str(folder)) from error
