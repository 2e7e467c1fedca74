"""Where the assistant's texts stand in a rendered chat: measured, never guessed.

The conversation is rendered by the tokenizer's own chat template. The targets are the assistant's texts, each with its
end marker, and nothing else. Where a text stands is not searched for and not derived from shorter renderings:

1. The conversation is rendered a second time with a mark put behind each assistant text. The template moves the mark
   along with the text. If every mark comes out exactly once, and taking the marks out gives the first rendering
   character for character, then a mark's place is the end of its text; and the text must stand right before it.
   A template that drops, rewrites or doubles an assistant text fails one of the two, and the record is refused with
   its place. Text that occurs several times cannot mislead, since nothing is searched. White space that the template
   itself cuts off the outside of a text is no part of it.
2. The end marker is what the template writes behind an assistant text that *ends* a conversation, up to and including
   the first special token (without one: all that is not white space). An answer in the middle has it only when the
   same characters follow there too. So the opening of the next turn is never taken for an end marker, and a template
   that closes the last turn only gives earlier answers no marker. A record in which no answer has one is refused: the
   model would never learn to stop.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.data.records import Conversation, Message
from unisono.errors import DataError, ModelError

_MARK = "Unisono{:05d}Mark"
_ANY_MARK = re.compile(r"Unisono(\d{5})Mark")
# What templates cut off the end of a message: nothing, all white space, newlines.
_CUTS: tuple[Callable[[str], str], ...] = (str, str.rstrip, lambda text: text.rstrip("\n"))


@dataclass(frozen=True)
class Layout:
    """A rendering and, for each assistant text, its characters: first, end of the text, end with the end marker."""

    text: str
    spans: tuple[tuple[int, int, int], ...]


class ChatTemplate:
    """A tokenizer's chat template, with the places of what it lets the assistant say."""

    def __init__(self, tokenizer: Any) -> None:
        if isinstance(tokenizer.chat_template, dict) and "default" not in tokenizer.chat_template:
            names = ", ".join(sorted(tokenizer.chat_template))
            raise ModelError(f"the tokenizer has several chat templates ({names}) and none of them is the default")
        self._tokenizer = tokenizer
        added = sorted((token for token in tokenizer.get_added_vocab() if token.strip()), key=len, reverse=True)
        self._added_token = re.compile("|".join(map(re.escape, added))) if added else None
        self._markers: dict[tuple[str, ...], str] = {}

    def lay_out(self, record: Conversation) -> Layout:
        """Render a conversation and measure its answers; DataError when they cannot be told from the rest."""
        text = self._apply(record.messages, record.where)
        cut, ends = self._measure(record, text)
        spans = []
        for i, end in ends.items():
            answer = self._without_cut_start(record, i, cut(record.messages[i].content), text)
            if not text.endswith(answer, 0, end):
                raise DataError(
                    f"the chat template changes assistant message {i + 1}, so what would be learned is not what stands "
                    "in the file",
                    where=record.where,
                    hint="some templates cut reasoning out of all but the last answer: "
                    "give each such answer a record of its own that ends with it",
                )
            marker = self._marker(tuple(message.role for message in record.messages[: i + 1]), record.where)
            closed = end + len(marker) if text.startswith(marker, end) else end
            spans.append((end - len(answer), end, closed))
        if all(end == closed for _, end, closed in spans):
            raise DataError(
                "the chat template puts no end marker after any answer: the model would not learn to stop",
                where=record.where,
                hint="let the chat template end each assistant message with the end token",
            )
        return Layout(text, tuple(spans))

    def _measure(self, record: Conversation, text: str) -> tuple[Callable[[str], str], dict[int, int]]:
        """Find where in ``text`` each assistant message ends (step 1 of the module's text).

        Returns what the template cuts off the end of a message, and the places by message.
        """
        answering = [i for i, message in enumerate(record.messages) if message.role == "assistant"]
        width = len(_MARK.format(0))
        for cut in _CUTS:
            marked = list(record.messages)
            for i in answering:
                marked[i] = Message("assistant", cut(marked[i].content) + _MARK.format(i))
            rendered = self._apply(marked, record.where)
            found = list(_ANY_MARK.finditer(rendered))
            if [int(match.group(1)) for match in found] == answering and _ANY_MARK.sub("", rendered) == text:
                return cut, {i: match.start() - k * width for k, (i, match) in enumerate(zip(answering, found))}
        raise DataError(
            "the chat template does not render every assistant message exactly once and as it is, "
            "so what is to be learned cannot be told from the rest",
            where=record.where,
        )

    def _without_cut_start(self, record: Conversation, i: int, answer: str, text: str) -> str:
        """Drop from an answer the leading white space that the template drops: it could pass for the header's own."""
        bare = answer.lstrip()
        if bare == answer:
            return answer
        messages = list(record.messages)
        messages[i] = Message("assistant", record.messages[i].content.lstrip())
        num_kept = len(text) - len(self._apply(messages, record.where))
        return answer[len(answer) - len(bare) - num_kept :]

    def _marker(self, roles: tuple[str, ...], where: str) -> str:
        """Return the end marker of an assistant message that ends a conversation with these roles, or nothing."""
        if roles not in self._markers:
            messages = [Message(role, _MARK.format(i)) for i, role in enumerate(roles)]
            closing = self._apply(messages, where).partition(messages[-1].content)[2]
            special = self._added_token.search(closing) if self._added_token else None
            self._markers[roles] = closing[: special.end()] if special else closing.rstrip()
        return self._markers[roles]

    def _apply(self, messages: Sequence[Message], where: str) -> str:
        from jinja2 import TemplateError

        try:
            return str(self._tokenizer.apply_chat_template(as_dicts(messages), tokenize=False))
        except (TemplateError, TypeError) as error:
            raise DataError(f"the chat template refuses the record: {error}", where=where) from error


def as_dicts(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Give messages the form that transformers takes."""
    return [{"role": message.role, "content": message.content} for message in messages]


def load_tokenizer(folder: Path, *, trust_remote_code: bool) -> Any:
    """Load the tokenizer of a model folder; ModelError when there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, LookupError, TypeError) as error:  # the last two: files that lack what they must hold
        raise ModelError(f"the tokenizer cannot be loaded: {error!r}", where=str(folder)) from error
