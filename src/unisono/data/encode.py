"""From conversations and texts to token ids and the mask of targets.

The ids are those of ``tokenizer.apply_chat_template(conversation)``, token for token: the rendered text is tokenised
once, and characters become tokens through the tokenizer's offsets. A token that holds characters of both prompt and
answer refuses the record. The one exception: spaces that the template itself puts before the answer, which many
tokenizers join to the following word (``[/INST] yes``).

Without a chat template, prompt and completion are joined as they are (instruction records with an empty line between)
and closed with the end token; completion and end token are targets. Of a plain text all tokens are targets, end token
included. Messages need a chat template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from unisono.data.records import Conversation, Shape, Text
from unisono.data.template import ChatTemplate, Layout, as_dicts
from unisono.errors import DataError, ModelError

JOIN: dict[Shape, str] = {"prompt_completion": "", "instruction": "\n\n"}
# Normalisation may shorten a text before it is tokenised; nothing shortens it to a quarter.
_NORMALISATION_ALLOWANCE = 4

Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Tokens:
    """A sample: ids (int32 ``[tokens]``), targets (bool ``[tokens]``, never the first), answers without end marker."""

    ids: npt.NDArray[np.int32]
    is_target: npt.NDArray[np.bool_]
    num_open_answers: int = 0


@dataclass(frozen=True)
class Overlong:
    """A sample that does not fit; ``num_tokens`` is a lower bound when it was not tokenised."""

    num_tokens: int
    exact: bool


class Encoder:
    """Turn records of one shape into tokens with their targets."""

    def __init__(self, tokenizer: Any, shape: Shape, max_length: int) -> None:
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
        self._tokenizer = tokenizer
        self._shape: Shape = shape
        self._max_length = max_length
        self._special_ids = np.array(sorted(set(tokenizer.all_special_ids)), np.int64)
        self._max_characters = max_length * max(map(len, tokenizer.get_vocab())) * _NORMALISATION_ALLOWANCE
        self._template = None if tokenizer.chat_template is None else ChatTemplate(tokenizer)
        self._is_plain = self._template is None or shape == "text"
        self._is_checked = False

    def encode(self, records: Sequence[Conversation | Text]) -> list[Tokens | Overlong | DataError]:
        """Tokenise a batch; each record gives its tokens, or the reason why it gives none."""
        answers: list[Tokens | Overlong | DataError | None] = [self._too_big(record) for record in records]
        pending: list[tuple[int, Layout]] = []
        for i, record in enumerate(records):
            if answers[i] is None:
                try:
                    pending.append((i, self._lay_out(record)))
                except DataError as error:
                    answers[i] = error
        encoded = self._tokenise([layout.text for _, layout in pending], add_special_tokens=self._is_plain)
        for (i, layout), (ids, offsets) in zip(pending, encoded):
            record = records[i]
            if not self._is_plain and not self._is_checked and isinstance(record, Conversation):
                self._check_ids(record, ids)
            try:
                tokens = (
                    self._plain(layout, ids, offsets, record.where)
                    if self._is_plain
                    else self._templated(layout, ids, offsets, record.where)
                )
            except DataError as error:
                answers[i] = error
                continue
            fits = len(tokens.ids) <= self._max_length
            answers[i] = tokens if fits else Overlong(len(tokens.ids), exact=True)
        return [answer for answer in answers if answer is not None]

    def _too_big(self, record: Conversation | Text) -> Overlong | None:
        """Tell without tokenising that a very long text cannot fit, so that one huge record does not cost minutes."""
        texts = [record.text] if isinstance(record, Text) else [message.content for message in record.messages]
        num_characters = sum(map(len, texts))
        if num_characters <= self._max_characters:
            return None
        return Overlong(num_characters * self._max_length // self._max_characters, exact=False)

    def _tokenise(self, texts: list[str], *, add_special_tokens: bool) -> list[tuple[npt.NDArray[np.int32], Offsets]]:
        if not texts:
            return []
        encoded = self._tokenizer(
            texts,
            add_special_tokens=add_special_tokens,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [
            (np.array(ids, np.int32), np.array(offsets, np.int64).reshape(-1, 2))
            for ids, offsets in zip(encoded["input_ids"], encoded["offset_mapping"])
        ]

    def _check_ids(self, record: Conversation, ids: npt.NDArray[np.int32]) -> None:
        """Compare our ids with the tokenizer's own, once: a tokenizer may have its own way with templates."""
        theirs = self._tokenizer.apply_chat_template(as_dicts(record.messages), tokenize=True, return_dict=True)[
            "input_ids"
        ]
        if list(theirs) != ids.tolist():
            raise ModelError(
                f"{type(self._tokenizer).__name__} tokenises a chat differently from its rendered text, "
                "so targets cannot be placed in it",
                where=record.where,
            )
        self._is_checked = True

    def _lay_out(self, record: Conversation | Text) -> Layout:
        if isinstance(record, Text):
            return Layout(record.text, ())
        if self._template is None:
            prompt = record.messages[0].content + JOIN[self._shape]
            text = prompt + record.messages[1].content
            return Layout(text, ((len(prompt), len(text), len(text)),))
        return self._template.lay_out(record)

    def _templated(self, layout: Layout, ids: npt.NDArray[np.int32], offsets: Offsets, where: str) -> Tokens:
        is_target = np.zeros(len(ids), np.bool_)
        for begin, end, closed in layout.spans:
            first = self._first_token(layout.text, ids, offsets, begin, where, is_template_text=True)
            last = int(np.flatnonzero(offsets[:, 0] < closed)[-1])
            beyond = layout.text[closed : offsets[last, 1]]
            # Some special tokens swallow the white space behind them; an answer's last word must not.
            if beyond and (end == closed or not beyond.isspace()):
                raise _straddles(layout.text, offsets[last], "end", where)
            is_target[first : last + 1] = True
        is_target[:1] = False
        return Tokens(ids, is_target, sum(end == closed for _, end, closed in layout.spans))

    def _plain(self, layout: Layout, ids: npt.NDArray[np.int32], offsets: Offsets, where: str) -> Tokens:
        end_token = self._tokenizer.eos_token_id
        if len(ids) == 0 or ids[-1] != end_token:
            ids = np.append(ids, np.int32(end_token))
        is_target = np.ones(len(ids), np.bool_)
        if layout.spans:
            begin = layout.spans[0][0]
            is_target[: self._first_token(layout.text, ids, offsets, begin, where, is_template_text=False)] = False
        is_target[:1] = False
        return Tokens(ids, is_target)

    def _first_token(
        self,
        text: str,
        ids: npt.NDArray[np.int32],
        offsets: Offsets,
        begin: int,
        where: str,
        *,
        is_template_text: bool,
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


def _straddles(text: str, offset: npt.NDArray[np.int64], border: str, where: str) -> DataError:
    begin, end = (int(place) for place in offset)
    return DataError(
        f"the token {text[begin:end]!r} holds the {border} of an answer together with other text, "
        "so the answer cannot be learned alone",
        where=where,
        hint="white space at the border is the usual cause: let the answer begin and end without it, "
        "or move it from the end of the prompt to the beginning of the completion",
    )
