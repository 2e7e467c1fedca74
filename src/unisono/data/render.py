"""Text from a conversation, as serving renders it: ``tokenizer.apply_chat_template``, sometimes on a shorter way.

For conversations of roles and texts alone the template is compiled here, in the same sandbox, and called directly:
``apply_chat_template`` looks at every value before it renders, which takes longer than the rendering. For each
sequence of roles the two are compared once, and where they differ the shorter way is not taken.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from unisono.data.records import Message
from unisono.errors import DataError, ModelError

# What the Python inside a template may raise.
_FAILURES = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)


class Renderer:
    """A tokenizer's chat template: conversations in, the text that serving would see out."""

    def __init__(self, tokenizer: Any) -> None:
        template = tokenizer.chat_template
        if isinstance(template, dict):
            if "default" not in template:
                names = ", ".join(sorted(template))
                raise ModelError(f"the tokenizer has several chat templates ({names}) and none of them is the default")
            template = template["default"]
        self._tokenizer = tokenizer
        try:
            self._direct = _compile(template)
        except TemplateSyntaxError as error:
            raise ModelError(
                f"the chat template is not valid Jinja: {error} (line {error.lineno})",
                where=str(tokenizer.name_or_path),
            ) from error
        self._special = dict(tokenizer.special_tokens_map)
        self._is_equal: dict[tuple[str, ...], bool] = {}

    def __call__(
        self,
        messages: Sequence[Message],
        where: str,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        prompt: bool = False,
    ) -> str:
        """Render on the long way; with ``prompt`` up to where the assistant would begin to speak.

        DataError when the template refuses the conversation.
        """
        chat = [message.as_dict() for message in messages]
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    chat, tools=list(tools) or None, tokenize=False, add_generation_prompt=prompt
                )
            )
        except _FAILURES as error:
            raise DataError(f"the chat template refuses the record: {error}", where=where) from error

    def plain(self, messages: Sequence[Message], roles: tuple[str, ...], where: str) -> str:
        """Render messages of role and text alone, on the short way where it has been found equal."""
        is_equal = self._is_equal.get(roles)
        if is_equal is False:
            return self(messages, where)
        chat = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text = self._direct(messages=chat, tools=None, documents=None, add_generation_prompt=False, **self._special)
        except _FAILURES:
            return self(messages, where)  # it says what is wrong
        if is_equal is None:
            exact = self(messages, where)
            self._is_equal[roles] = text == exact
            return exact
        return text


class _Generation(Extension):
    """Let ``{% generation %}`` blocks pass: where they stand is not needed."""

    tags = {"generation"}  # noqa: RUF012 (the base class is read so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(template: str) -> Callable[..., str]:
    """Compile a template with what transformers offers to templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template).render


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)


class NamedRefusal:
    """Turn what the ``tokenizers`` library raises, a bare ``Exception``, into a ModelError; let all else pass."""

    def __init__(self, message: str, where: str) -> None:
        self._message = message
        self._where = where

    def __enter__(self) -> None:
        """Begin the part that calls the library."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Judge the class itself: its subclasses are other errors."""
        if kind is Exception:
            raise ModelError(f"{self._message}: {error}", where=self._where) from error
