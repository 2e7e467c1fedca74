"""Text from a conversation, as serving renders it: ``tokenizer.apply_chat_template``, sometimes on a shorter way.

The template is compiled here, in the same sandbox, and called directly: ``apply_chat_template`` looks at every value
before it renders, which takes longer than the rendering. The two are compared once for each sequence of roles and the
fields that its messages have; where they differ the shorter way is not taken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
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
        # A choice of templates, and reasoning under a second name, are the tokenizer's own business.
        self._is_comparable = isinstance(template, str) and not re.search(r"\bthinking\b", template)
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
        self._is_equal: dict[Hashable, bool] = {}

    def __call__(
        self,
        messages: Sequence[Message],
        where: str,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        prompt: bool = False,
    ) -> str:
        """Render messages and tools; with ``prompt`` up to where the assistant would begin to speak.

        DataError when the template refuses the conversation.
        """
        chat = [message.as_dict() for message in messages]
        kind = (prompt, bool(tools), *[(message["role"], *message) for message in chat])
        return self._render(chat, kind, where, list(tools) or None, prompt)

    def plain(self, messages: Sequence[Message], roles: tuple[str, ...], where: str) -> str:
        """Render messages that are role and text alone."""
        chat = [{"role": message.role, "content": message.content} for message in messages]
        return self._render(chat, roles, where, None, False)

    def _render(
        self,
        chat: list[dict[str, Any]],
        kind: Hashable,
        where: str,
        tools: list[Mapping[str, Any]] | None,
        prompt: bool,
    ) -> str:
        is_equal = self._is_equal.get(kind, None if self._is_comparable else False)
        if is_equal is False:
            return self._exact(chat, where, tools, prompt)
        try:
            text = self._direct(
                messages=chat, tools=tools, documents=None, add_generation_prompt=prompt, **self._special
            )
        except _FAILURES:
            return self._exact(chat, where, tools, prompt)  # it says what is wrong
        if is_equal is None:
            exact = self._exact(chat, where, tools, prompt)
            self._is_equal[kind] = text == exact
            return exact
        return text

    def _exact(
        self, chat: list[dict[str, Any]], where: str, tools: list[Mapping[str, Any]] | None, prompt: bool
    ) -> str:
        try:
            return str(
                self._tokenizer.apply_chat_template(chat, tools=tools, tokenize=False, add_generation_prompt=prompt)
            )
        except _FAILURES as error:
            raise DataError(f"the chat template refuses the record: {error}", where=where) from error


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
