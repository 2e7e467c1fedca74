"""From conversations and texts to token ids and the mask of targets.

The ids are those of ``tokenizer.apply_chat_template(conversation)``, token for token: the rendered text is tokenised
once, and characters become tokens through the tokenizer's offsets. A token that holds characters of both prompt and
answer refuses the record. The one exception: spaces that the template itself puts before the answer, which many
tokenizers join to the following word (``[/INST] yes``).

Without a chat template, prompt and completion are joined as they are (instruction records with an empty line between)
and closed with the end token; completion and end token are targets. Of a plain text all tokens are targets, end token
included. Messages need a chat template. A text that brings its own beginning token gets no second one.

Which answers are targets: all (``assistant``), the last (``last``), or every token (``all``); never those that the
file marks with ``train: false``. A sample that is too long is left out (``drop``, ``error``), loses the beginning of
its prompt but never a target (``truncate_prompt``), or, a plain text, is cut in pieces (``split``).
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from unisono.config.schema import Targets, WhenOverlong
from unisono.data.records import Conversation, Shape, Text
from unisono.data.render import NamedRefusal
from unisono.data.template import ChatTemplate, Layout
from unisono.errors import DataError, ModelError

LEAST_PIECE = 3  # tokens of a split text: of an odd number in twos, one would be left alone
JOIN: dict[Shape, str] = {"prompt_completion": "", "instruction": "\n\n"}
# Normalisation may shorten a text before it is tokenised; nothing shortens it to a quarter.
_NORMALISATION_ALLOWANCE = 4
_BETWEEN_WORDS = re.compile(r"\w[ \n](?=\w)")

Ids = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]
Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Tokens:
    """A sample: ids (int32 ``[tokens]``), targets (bool ``[tokens]``, never the first), answers without end marker.

    is_cut: the beginning of its prompt was taken away, because it was too long.
    """

    ids: Ids
    is_target: Flags
    num_open_answers: int = 0
    is_cut: bool = False


@dataclass(frozen=True)
class Overlong:
    """A sample that does not fit; ``num_tokens`` is a lower bound when it was not tokenised."""

    num_tokens: int
    exact: bool


Result = tuple[Tokens, ...] | Overlong | DataError


class Encoder:
    """Turn records of one shape into tokens with their targets.

    Takes the tokenizer over: its padding and truncation are switched off. ModelError when it cannot be used for
    records of this shape; DataError when ``split`` is asked for records that cannot be split.
    """

    def __init__(
        self,
        tokenizer: Any,
        shape: Shape,
        max_length: int,
        *,
        targets: Targets = "assistant",
        overlong: WhenOverlong = "drop",
    ) -> None:
        _check(tokenizer, shape, overlong)
        if overlong == "split" and max_length < LEAST_PIECE:
            raise DataError(
                f"data.max_length is {max_length}, and the pieces of a split text need {LEAST_PIECE} tokens: "
                "of one token alone nothing can be learned",
                where="data.max_length",
            )
        self._tokenizer = tokenizer
        self._shape: Shape = shape
        self._max_length = max_length
        self._targets = targets
        self._overlong = overlong
        self._end_token: int = tokenizer.eos_token_id
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._max_characters = max_length * max(map(len, tokenizer.get_vocab())) * _NORMALISATION_ALLOWANCE
        self._template = None if tokenizer.chat_template is None or shape == "text" else ChatTemplate(tokenizer)
        self._checked: set[tuple[str, ...]] = set()
        self._learned: dict[tuple[str, ...], list[int]] = {}
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_padding()
        self._backend.no_truncation()
        self._backend.encode_special_tokens = tokenizer.split_special_tokens
        self._adds_begin = self._backend.encode("").ids[:1] == [tokenizer.bos_token_id]

    def encode(self, records: Sequence[Conversation | Text]) -> list[Result]:
        """Tokenise a batch; each record gives its samples (one, or the pieces of a split text), or the reason why none.

        A sample whose targets are all ``train: false`` has no target.
        """
        answers: list[Result | None] = [self._too_big(record) for record in records]
        pending: list[tuple[int, Layout]] = []
        for i, record in enumerate(records):
            if answers[i] is None:
                try:
                    pending.append((i, self._without_far_prompt(self._lay_out(record))))
                except DataError as error:
                    answers[i] = error
        with NamedRefusal("the tokenizer refuses a text", str(self._tokenizer.name_or_path)):
            encodings = self._backend.encode_batch(
                [layout.text for _, layout in pending], add_special_tokens=self._template is None
            )
        for (i, layout), encoding in zip(pending, encodings):
            try:
                answers[i] = self._samples(records[i], layout, encoding)
            except DataError as error:
                answers[i] = error
        return [answer for answer in answers if answer is not None]

    def _samples(self, record: Conversation | Text, layout: Layout, encoding: Any) -> Result:
        if self._template is None:
            tokens = self._plain(layout, encoding, record.where)
        else:
            tokens = self._templated(layout, encoding, record.where)
            if isinstance(record, Conversation) and not layout.is_cut:
                self._check_ids(record, layout.kind, tokens.ids)
        if len(tokens.ids) <= self._max_length and not layout.is_cut:
            return (tokens,)
        if self._overlong == "split":
            return self._split(tokens)
        cut = self._without_prompt_start(tokens) if self._overlong == "truncate_prompt" else None
        return (cut,) if cut else Overlong(len(tokens.ids), exact=True)

    def _too_big(self, record: Conversation | Text) -> Overlong | None:
        """Tell without tokenising that a very long text cannot fit, so that one huge record does not cost minutes."""
        if self._overlong == "split":
            return None
        if isinstance(record, Text):
            num_characters = len(record.text)
        else:
            num_characters = sum([len(message.content) + len(message.reasoning) for message in record.messages])
        if num_characters <= self._max_characters:
            return None
        if self._overlong == "truncate_prompt" and isinstance(record, Conversation) and self._targets != "all":
            # A prompt of any length can be cut.
            num_characters = sum(len(record.messages[i].content) for i in self._learned_messages(record))
            if num_characters <= self._max_characters:
                return None
        return Overlong(num_characters * self._max_length // self._max_characters, exact=False)

    def _without_far_prompt(self, layout: Layout) -> Layout:
        """Cut text away that a truncated prompt loses anyhow, so that one huge prompt does not cost gigabytes.

        What is left has more tokens than a sample may, and begins between two words, far before the tokens that are
        kept: those are the ones of the whole text. A prompt without such a place is tokenised whole.
        """
        if self._overlong != "truncate_prompt" or not layout.spans:
            return layout
        begin = max(0, layout.spans[0][0] - 2 * self._max_characters)
        seam = _BETWEEN_WORDS.search(layout.text, begin, begin + self._max_characters) if begin else None
        if seam is None:
            return layout
        first = self._tokenizer.bos_token or ""
        head = first if self._template is not None and layout.text.startswith(first) else ""
        shift = seam.end() - 1 - len(head)
        spans = [(a - shift, b - shift, c - shift) for a, b, c in layout.spans]
        return replace(layout, text=head + layout.text[seam.end() - 1 :], spans=spans, is_cut=True)

    def _check_ids(self, record: Conversation, kind: tuple[str, ...], ids: Ids) -> None:
        """Compare our ids with the tokenizer's own, once for each sequence of roles."""
        if kind in self._checked:
            return
        chat = [message.as_dict() for message in record.messages]
        theirs = self._tokenizer.apply_chat_template(
            chat, tools=list(record.tools) or None, tokenize=True, return_dict=True
        )["input_ids"]
        if list(theirs) != ids.tolist():
            raise ModelError(
                f"{type(self._tokenizer).__name__} tokenises a chat differently from its rendered text, "
                "so targets cannot be placed in it",
                where=record.where,
            )
        self._checked.add(kind)

    def _lay_out(self, record: Conversation | Text) -> Layout:
        if isinstance(record, Text):
            return Layout(record.text, ())
        learned = self._learned_messages(record)
        if self._template is None:
            prompt = record.messages[0].content + JOIN[self._shape]
            text = prompt + record.messages[1].content
            return Layout(text, ((len(prompt), len(text), len(text)),))
        return self._template.lay_out(record, () if self._targets == "all" else learned)

    def _learned_messages(self, record: Conversation) -> list[int]:
        """Number the messages that are targets; DataError when every token is one and the file says otherwise."""
        messages = record.messages
        roles = tuple([message.role for message in messages])
        learned = self._learned.get(roles)
        if learned is None:
            learned = [i for i, role in enumerate(roles) if role == "assistant"]
            if self._targets == "last":
                learned = learned[-1:]
            self._learned[roles] = learned
        for message in messages:
            if message.train is False:
                if self._targets == "all":
                    raise DataError(
                        f"message {messages.index(message) + 1} is not to be learned (train: false, or weight 0), "
                        "but data.targets=all learns every token",
                        where=record.where,
                        hint="data.targets=assistant leaves such messages out",
                    )
                return [i for i in learned if messages[i].train is not False]
        return learned

    def _templated(self, layout: Layout, encoding: Any, where: str) -> Tokens:
        ids = _ids(encoding)
        if self._targets == "all":
            return Tokens(ids, _all_but_first(len(ids)))
        is_target = np.zeros(len(ids), np.bool_)
        num_open = 0
        for begin, end, closed in layout.spans:
            first, last = _quick_span(encoding, begin, closed) or self._span(
                layout.text, encoding, begin, end, closed, where
            )
            is_target[first : last + 1] = True
            num_open += end == closed
        is_target[:1] = False
        return Tokens(ids, is_target, num_open)

    def _span(self, text: str, encoding: Any, begin: int, end: int, closed: int, where: str) -> tuple[int, int]:
        """Find the first and the last token of an answer; DataError when one holds other text as well."""
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        first = self._first_token(text, encoding.ids, offsets, begin, where, is_template_text=True)
        last = int(np.flatnonzero(offsets[:, 0] < closed)[-1])
        beyond = text[closed : offsets[last, 1]]
        # Some special tokens swallow the white space behind them; an answer's last word must not.
        if beyond and (end == closed or not beyond.isspace()):
            raise _straddles(text, offsets[last], "end", where)
        return first, last

    def _plain(self, layout: Layout, encoding: Any, where: str) -> Tokens:
        ids = _ids(encoding)
        is_target = np.ones(len(ids), np.bool_)
        if layout.spans and self._targets != "all":
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            begin = layout.spans[0][0]
            first = self._first_token(layout.text, encoding.ids, offsets, begin, where, is_template_text=False)
            is_target[:first] = False
        if len(ids) == 0 or ids[-1] != self._end_token:
            ids = np.append(ids, np.int32(self._end_token))
            is_target = np.append(is_target, True)
        if self._adds_begin and len(ids) > 1 and ids[0] == ids[1]:
            ids, is_target = ids[1:], is_target[1:]  # the text has a beginning token of its own
        is_target[:1] = False
        return Tokens(ids, is_target)

    def _without_prompt_start(self, tokens: Tokens) -> Tokens | None:
        """Cut tokens away before the first target, behind a beginning token; None when the targets do not fit."""
        kept = int(tokens.ids[0] == self._tokenizer.bos_token_id)
        start = len(tokens.ids) - (self._max_length - kept)
        targets = np.flatnonzero(tokens.is_target)
        # Something must precede the first target, for it to be predicted.
        if len(targets) == 0 or start > targets[0] - (1 - kept):
            return None
        ids, is_target = (np.concatenate([x[:kept], x[start:]]) for x in (tokens.ids, tokens.is_target))
        return Tokens(ids, is_target, tokens.num_open_answers, is_cut=True)

    def _split(self, tokens: Tokens) -> tuple[Tokens, ...]:
        """Cut a text in pieces of at most ``max_length`` tokens; the first of each is context only."""
        size = self._max_length
        starts = list(range(0, len(tokens.ids), size))
        if len(tokens.ids) - starts[-1] == 1:
            starts[-1] -= 1  # a token alone could not be learned
        pieces = [tokens.ids[a:b] for a, b in zip(starts, [*starts[1:], len(tokens.ids)])]
        return tuple(Tokens(piece, _all_but_first(len(piece))) for piece in pieces)

    def _first_token(
        self, text: str, ids: Sequence[int], offsets: Offsets, begin: int, where: str, *, is_template_text: bool
    ) -> int:
        """Find the token that begins at character ``begin``; DataError when one reaches over that border."""
        reaching = np.flatnonzero(offsets[:, 1] > begin)
        if len(reaching) == 0:
            raise DataError("no token of the answer is left after the tokenizer's normalisation", where=where)
        first = int(reaching[0])
        before = text[offsets[first, 0] : begin]
        if before and (before.strip(" ") or not is_template_text):
            raise _straddles(text, offsets[first], "beginning", where)
        # A token without characters is a piece of white space whose place the tokenizer does not tell.
        if first > 0 and offsets[first - 1, 0] == offsets[first - 1, 1] and ids[first - 1] not in self._special_ids:
            raise _straddles(text, offsets[first - 1], "beginning", where)
        return first


def _check(tokenizer: Any, shape: Shape, overlong: WhenOverlong) -> None:
    """Refuse a tokenizer that cannot do what records of this shape need."""
    if not tokenizer.is_fast:
        raise ModelError(
            f"the tokenizer {type(tokenizer).__name__} gives no character offsets; a fast one is needed",
            hint="save a tokenizer.json beside the model",
        )
    if tokenizer.chat_template is None and shape in ("messages", "conversations"):
        raise ModelError(
            f"the tokenizer has no chat template, and records of the shape {shape} need one",
            hint="use the instruct variant of the model, put a chat_template.jinja beside it, "
            "or give the data as prompt/completion",
        )
    if (tokenizer.chat_template is None or shape == "text") and tokenizer.eos_token_id is None:
        raise ModelError("the tokenizer has no end token, so the model could not learn to stop")
    if overlong == "split" and shape != "text":
        raise DataError(
            f"data.overlong is split, but the records are of the shape {shape}; only plain texts can be split",
            hint="data.overlong=truncate_prompt keeps the answers whole",
        )


def _ids(encoding: Any) -> Ids:
    """Copy the ids; by way of an array, which takes a list in a third of numpy's time."""
    return np.frombuffer(array("i", encoding.ids), np.int32)


def _all_but_first(number: int) -> Flags:
    is_target = np.ones(number, np.bool_)
    is_target[:1] = False
    return is_target


def _quick_span(encoding: Any, begin: int, closed: int) -> tuple[int, int] | None:
    """Find first and last token when the borders are those of ordinary tokens with characters; else None.

    Asks for single tokens instead of copying the offsets of all.
    """
    first = encoding.char_to_token(begin)
    last = encoding.char_to_token(closed - 1)
    if first is None or last is None or encoding.token_to_chars(first)[0] != begin:
        return None
    if first > 0:
        before = encoding.token_to_chars(first - 1)
        if before is None or not before[0] < before[1] <= begin:
            return None
    if encoding.token_to_chars(last)[1] != closed:
        return None
    # The tokens of one character all have its place.
    after = encoding.token_to_chars(last + 1) if last + 1 < len(encoding) else (closed, closed)
    if after is None or after[0] < closed:
        return None
    return first, last


def _straddles(text: str, offset: npt.NDArray[np.int64], border: str, where: str) -> DataError:
    begin, end = (int(place) for place in offset)
    return DataError(
        f"the token {text[begin:end]!r} holds the {border} of an answer together with other text, "
        "so the answer cannot be learned alone",
        where=where,
        hint="white space at the border is the usual cause: let the answer begin and end without it, "
        "or move it from the end of the prompt to the beginning of the completion",
    )
