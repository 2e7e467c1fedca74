"""A block of raw records becomes pieces of the stores, and an account of every record. Runs on any core.

Every record ends in exactly one of: kept, longer than allowed, without a target, bad.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unisono.data.encode import Encoder, Overlong, Tokens
from unisono.data.job import Counts, Job, LeftOut
from unisono.data.records import Conversation, Shape, Text, content_share, convert, ignored_fields
from unisono.data.source.raw import Raw, parse
from unisono.data.store import Piece
from unisono.errors import DataError


@dataclass(frozen=True)
class Block:
    """Records of one shape that follow each other; ``first`` is the number of the first in the source order.

    entries: the file's place in the job, and the record. shape: None while no record could be read yet.
    """

    first: int
    shape: Shape | None
    entries: list[tuple[int, Raw]]


@dataclass(frozen=True, eq=False)
class Encoded:
    """What became of a block: a piece for each store, and an account of what is not in them."""

    pieces: tuple[Piece, ...]
    counts: Counts
    left_out: list[LeftOut]
    bad: list[DataError]
    ignored: frozenset[str]


@dataclass
class _Growing:
    """A piece that samples are added to."""

    ids: list[np.ndarray] = field(default_factory=list)
    is_target: list[np.ndarray] = field(default_factory=list)
    index: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, tokens: Tokens, num_targets: int, record: int) -> None:
        self.ids.append(tokens.ids)
        self.is_target.append(tokens.is_target)
        self.index.append((len(tokens.ids), num_targets, record))

    def piece(self) -> Piece:
        ids = np.concatenate(self.ids) if self.ids else np.zeros(0, np.int32)
        is_target = np.concatenate(self.is_target) if self.is_target else np.zeros(0, np.bool_)
        return Piece(ids, is_target, np.array(self.index, np.int64).reshape(-1, 3))


class BlockEncoder:
    """Encodes block after block for one job, with one tokenizer."""

    def __init__(self, job: Job, tokenizer: Any) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._fields = dict(job.fields)
        self._encoders: dict[Shape, Encoder] = {}

    def __call__(self, block: Block) -> Encoded:
        """Encode one block."""
        account = _Account(self._job)
        records: list[Conversation | Text] = []
        kept: list[tuple[int, int, str]] = []
        for number, (file, raw) in enumerate(block.entries, block.first):
            try:
                records.append(self._convert(raw, file, block.shape, account))
            except DataError as error:
                account.bad_record(file, raw.place, error)
            else:
                kept.append((number, file, raw.place))
        results = self._encoder(block.shape).encode(records) if block.shape is not None and records else []
        for record, result, (number, file, place) in zip(records, results, kept):
            account.settle(record, result, number, file, place)
        return account.encoded(len(block.entries))

    def _convert(self, raw: Raw, file: int, shape: Shape | None, account: _Account) -> Conversation | Text:
        where = f"{self._job.files[file].name}:{raw.place}"
        parsed = parse(raw)
        if parsed.value is None or shape is None:
            raise DataError(parsed.problem, where=where)
        record = convert(parsed.value, shape, where, self._fields)
        account.ignored |= ignored_fields(parsed.value, shape, self._fields)
        return record

    def _encoder(self, shape: Shape) -> Encoder:
        if shape not in self._encoders:
            job = self._job
            self._encoders[shape] = Encoder(
                self._tokenizer, shape, job.max_length, targets=job.targets, overlong=job.overlong
            )
        return self._encoders[shape]


class _Account:
    """The pieces of a block as they grow, and where its records went."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._growing = [_Growing() for _ in range(2 if job.validation_share else 1)]
        self._counts = dict.fromkeys(vars(Counts()), 0)
        self._left_out: list[LeftOut] = []
        self._bad: list[DataError] = []
        self.ignored: set[str] = set()

    def settle(
        self,
        record: Conversation | Text,
        result: Sequence[Tokens] | Overlong | DataError,
        number: int,
        file: int,
        place: str,
    ) -> None:
        """Keep a record's tokens, or put down why there are none."""
        counts = self._counts
        if isinstance(result, DataError):
            self.bad_record(file, place, result)
        elif isinstance(result, Overlong):
            about = "" if result.exact else "more than "
            reason = f"{about}{result.num_tokens:,} tokens, and data.max_length is {self._job.max_length:,}"
            counts["dropped_overlong"] += 1
            counts["dropped_tokens"] += result.num_tokens
            self._left_out.append(LeftOut(file, place, "overlong", reason))
        else:
            self._keep(record, result, number, file, place)

    def _keep(self, record: Conversation | Text, samples: Sequence[Tokens], number: int, file: int, place: str) -> None:
        counts = self._counts
        num_targets = [int(np.count_nonzero(tokens.is_target)) for tokens in samples]
        if not any(num_targets):
            counts["dropped_no_target"] += 1
            counts["dropped_tokens"] += sum(len(tokens.ids) for tokens in samples)
            self._left_out.append(LeftOut(file, place, "no_target", "no target: nothing in it is predicted"))
            return
        share = self._job.validation_share
        is_validation = share > 0 and content_share(record) < share
        counts["kept"] += 1
        counts["kept_validation"] += is_validation
        for tokens, count in zip(samples, num_targets):
            self._growing[is_validation].add(tokens, count, number)
            counts["samples"] += 1
            counts["tokens"] += len(tokens.ids)
            counts["targets"] += count
            counts["open_answers"] += tokens.num_open_answers
            counts["cut_prompts"] += tokens.is_cut

    def bad_record(self, file: int, place: str, error: DataError) -> None:
        """Put down a record that cannot be used."""
        self._counts["skipped_bad"] += 1
        self._bad.append(error)
        self._left_out.append(LeftOut(file, place, "bad", error.message))

    def encoded(self, num_records: int) -> Encoded:
        """Close the account."""
        counts = Counts(**{**self._counts, "records": num_records})
        pieces = tuple(growing.piece() for growing in self._growing)
        return Encoded(pieces, counts, self._left_out, self._bad, frozenset(self.ignored))
