"""Look for what spoils a run without stopping it: copies, leaks, empty answers, much that was left out ...

Only prepared data is judged; what cannot be prepared at all has been refused before. The source files are read again
only to name the place of a record, as far as needed, and to look for special tokens in the texts of the first records
of each part: in a prompt of the store they cannot be told from the template's own.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from unisono.data.copies import Pairs, first_pairs, repeats, sort
from unisono.data.findings import Finding, Status
from unisono.data.job import LeftOut
from unisono.data.lengths import blocks, count_lengths
from unisono.data.locate import first_texts, places
from unisono.data.prepare import Part, Prepared
from unisono.data.progress import PROGRESS_SECONDS
from unisono.data.scan import NUM_EXAMPLES, SHORT_TARGETS, Hits, Scan, Special, scan
from unisono.data.sets import training_sets, validation_sets
from unisono.data.store import Ints
from unisono.data.template import load_tokenizer

LEAK_FAILS_SHARE = 0.01
DROPPED_WARNS_SHARE = 0.05
SMALL_SET_SAMPLES = 20
TEXT_RECORDS = 10_000
MANY_PASSES = 10
LABELS_SHARE = 0.5
LONG_FACTOR = 4  # times the length that 95 % do not exceed ...
LONG_TOKENS = 2048  # ... and above this: shorter samples cost no memory worth a word
_LEAK_HINT = "leave them out of one of the two, or name data.validation as a share: it keeps equal records together"

Record = tuple[Part, int]


@dataclass(frozen=True)
class _Draft:
    """A finding whose examples are still numbers of records: one alone, or two with the words between them."""

    finding: Finding
    examples: tuple[tuple[Record, ...], ...] = ()
    words: str = ""


def examine(
    prepared: Prepared, tokenizer_dir: Path, *, trust_remote_code: bool = False, progress: Callable[[str], None] = print
) -> list[Finding]:
    """Look at all samples and return what was found, and what was looked for and not found.

    DataError when a source file changed so that its records cannot be named.
    """
    tokenizer = load_tokenizer(tokenizer_dir, trust_remote_code=trust_remote_code)
    special = Special.of(tokenizer)
    groups = [[one] for one in validation_sets(prepared)]
    training = training_sets(prepared)
    num_samples = sum(len(one.store) for group in [training, *groups] for one in group)
    ticker = _Ticker(progress, num_samples)
    train = scan(training, special, ticker.samples)
    others = [scan(group, special, ticker.samples) for group in groups]
    drafts = [
        *_copies_and_leaks(train, others),
        *(draft for seen in (train, *others) for draft in _samples(seen)),
        *(draft for part in prepared.parts for draft in _part(part)),
        *(() if tokenizer.split_special_tokens else (_special_texts(part, special, ticker) for part in prepared.parts)),
        *_sizes(others),
        *_passes(prepared),
    ]
    return _named(drafts, ticker)


def _copies_and_leaks(train: Scan, others: Sequence[Scan]) -> Iterator[_Draft]:
    """Look for equal samples, then for equal prompts: one sorting at a time in memory."""
    whole = sort(train.whole)
    is_copy = whole.repeating()
    yield _pairs(
        "duplicates",
        _label(train),
        "warn",
        int(np.count_nonzero(is_copy)),
        f"of {train.num_samples:,} samples are exact copies of another",
        _resolved(repeats(is_copy, train.whole, whole), train, train),
        "repeats",
        "a copy is learned twice as often; keep one of them",
    )
    leaked = [whole.find(seen.whole) for seen in others]
    del whole
    for seen, learned in zip(others, leaked):
        yield _leak(train, seen, learned)
    prompts = sort(train.prompt)
    is_other = prompts.repeating(is_copy)
    yield _pairs(
        "same_prompt",
        _label(train),
        "info",
        int(np.count_nonzero(is_other)),
        f"of {train.num_samples:,} samples have the prompt of an earlier one, and another answer",
        _resolved(repeats(is_other, train.prompt, prompts), train, train),
        "has the prompt of",
        "fine where several answers are right; the loss cannot reach zero on them",
    )
    for seen, learned in zip(others, leaked):
        has_prompt = (learned < 0) & (seen.prompt != b"")
        yield _leaked_prompt(train, seen, np.where(has_prompt, prompts.find(seen.prompt), -1))


def _leak(train: Scan, seen: Scan, learned: Ints) -> _Draft:
    """Judge validation samples that are learned as a whole; ``learned``: where in the training data, or -1."""
    num = int(np.count_nonzero(learned >= 0))
    share = num / seen.num_samples
    return _pairs(
        "leak",
        _label(seen),
        "fail" if share >= LEAK_FAILS_SHARE else "warn",
        num,
        f"of {seen.num_samples:,} samples ({share:.1%}) are in the training data too",
        _resolved(first_pairs(learned), seen, train),
        "is also",
        _LEAK_HINT,
    )


def _leaked_prompt(train: Scan, seen: Scan, learned: Ints) -> _Draft:
    return _pairs(
        "leaked_prompt",
        _label(seen),
        "warn",
        int(np.count_nonzero(learned >= 0)),
        f"of {seen.num_samples:,} samples have a prompt of the training data, and another answer",
        _resolved(first_pairs(learned), seen, train),
        "has the prompt of",
        "the answer may be known by heart; leave such prompts out of one of the two",
    )


def _samples(seen: Scan) -> Iterator[_Draft]:
    """Judge what was seen of samples one by one."""
    share = seen.short.num / seen.num_samples
    yield _hits(
        "short_answers",
        seen,
        seen.short,
        "info" if share >= LABELS_SHARE else "warn",
        f"of {seen.num_samples:,} samples ({share:.1%}) have at most {SHORT_TARGETS} targets besides the end marker",
        "fine where labels are learned; otherwise answers are missing",
    )
    yield _hits(
        "few_targets",
        seen,
        seen.few,
        "warn",
        f"of {seen.num_samples:,} samples: less than 1 % of the tokens are targets",
        "most of the time is spent on reading prompts; shorter ones, or several turns in a record, cost less",
    )
    yield _hits(
        "end_markers",
        seen,
        seen.early,
        "warn",
        f"of {seen.num_samples:,} samples have an end marker within an answer: what follows it is never said",
        "take the marker out of the texts; a tokenizer reads it there as the end of the turn",
    )
    stores = [one.store for one in seen.sets]
    lengths = count_lengths(stores)
    limit = max(LONG_FACTOR * lengths.percentile(95), LONG_TOKENS)
    hits, begin = Hits(), 0
    for store in stores:
        for block in blocks(len(store)):
            hits.add(store.lengths[block] > limit, begin + int(block[0]))
        begin += len(store)
    yield _hits(
        "long_samples",
        seen,
        hits,
        "warn",
        f"of {seen.num_samples:,} samples ({hits.num / seen.num_samples:.2%}) are longer than {limit:,.0f} tokens"
        f" (95 % have up to {lengths.percentile(95):,.0f}, the longest has {lengths.longest:,})",
        "the longest sample decides how much memory a micro-batch needs; data.max_length leaves such ones out",
    )


def _part(part: Part) -> Iterator[_Draft]:
    """Judge what became of the records of a source or a set."""
    counts, label = part.counts, part.label
    num_lost = counts.num_left_out
    share = num_lost / counts.records
    named = [LeftOut(**item).line(part.job) for item in part.summary["left_out"][:NUM_EXAMPLES]]
    yield _Draft(
        Finding(
            "left_out",
            label,
            "warn" if share > DROPPED_WARNS_SHARE else "info" if num_lost else "ok",
            num_lost,
            f"{num_lost:,} of {counts.records:,} records ({share:.1%}) are left out: {counts.dropped_overlong:,} longer"
            f" than data.max_length, {counts.dropped_no_target:,} without a target, {counts.skipped_bad:,} bad",
            tuple(named),
            f"all of them are in {part.folder / 'left_out.jsonl'}" if num_lost else None,
        )
    )
    yield _Draft(
        Finding(
            "open_answers",
            label,
            "warn" if counts.open_answers else "ok",
            counts.open_answers,
            f"{counts.open_answers:,} answers have no end marker: the chat template does not close them",
            hint="the model does not learn to stop after them; data.targets=last learns the last answer only"
            if counts.open_answers
            else None,
        )
    )


def _special_texts(part: Part, special: Special, ticker: _Ticker) -> _Draft:
    """Look for special tokens in the texts of the first records."""
    pattern = re.compile(b"|".join(re.escape(text.encode()) for text in special.texts) or b"(?!)")
    num_records, hits = 0, Hits()
    names: set[bytes] = set()
    for number, text in first_texts(part, TEXT_RECORDS, ticker.record):
        num_records += 1
        found = set(pattern.findall(text))
        names |= found
        hits.add(np.array([bool(found)]), number)
    listed = ", ".join(sorted(name.decode() for name in names))
    return _pairs(
        "special_tokens",
        part.label,
        "warn",
        hits.num,
        f"of the first {num_records:,} records have special tokens in their texts{listed and f': {listed}'}",
        [((part, number),) for number in hits.first],
        "",
        "the tokenizer takes them for its own, as if the template had written them; take them out of the texts",
    )


def _sizes(others: Sequence[Scan]) -> Iterator[_Draft]:
    """Judge whether validation can tell anything."""
    if not others:
        detail = "there is no validation data: nothing would show that the model only learns by heart"
        yield _Draft(Finding("validation_size", "validation", "info", 0, detail, hint="data.validation=0.02"))
    for seen in others:
        is_small = seen.num_samples < SMALL_SET_SAMPLES
        detail = f"{seen.num_samples:,} samples"
        hint = f"with under {SMALL_SET_SAMPLES} samples the loss depends on which ones they are; use more"
        status: Status = "warn" if is_small else "ok"
        yield _Draft(
            Finding("validation_size", _label(seen), status, seen.num_samples, detail, hint=hint if is_small else None)
        )


def _passes(prepared: Prepared) -> Iterator[_Draft]:
    """Judge how often a source is repeated within an epoch."""
    names = [part.name for part in prepared.parts if part.kind == "train"]
    for name, weight, size in zip(names, prepared.weights, prepared.sizes):
        if name:
            is_many = weight > MANY_PASSES
            yield _Draft(
                Finding(
                    "repetition",
                    f"train {name}",
                    "warn" if is_many else "ok",
                    size if is_many else 0,
                    f"each of the {size:,} samples is seen {weight:g} times in an epoch (data.weights)",
                    hint="so few samples, so often, are learned by heart; lower the weight" if is_many else None,
                )
            )


def _hits(name: str, seen: Scan, hits: Hits, status: Status, detail: str, hint: str) -> _Draft:
    examples = [(_record(seen, sample),) for sample in hits.first]
    return _pairs(name, _label(seen), status, hits.num, detail, examples, "", hint)


def _pairs(
    name: str,
    label: str,
    status: Status,
    num: int,
    detail: str,
    examples: Sequence[tuple[Record, ...]],
    words: str,
    hint: str,
) -> _Draft:
    """Draft a finding that is fine when it counts nothing."""
    found = Finding(name, label, status if num else "ok", num, f"{num:,} {detail}", hint=hint if num else None)
    return _Draft(found, tuple(examples), words)


def _resolved(pairs: Pairs, left: Scan, right: Scan) -> list[tuple[Record, ...]]:
    return [(_record(left, one), _record(right, other)) for one, other in pairs]


def _record(seen: Scan, sample: int) -> Record:
    one, record = seen.locate(sample)
    return one.part, record


def _label(seen: Scan) -> str:
    return "train" if seen.sets[0].kind == "train" else seen.sets[0].label


def _named(drafts: Sequence[_Draft], ticker: _Ticker) -> list[Finding]:
    """Name the examples by file and place."""
    wanted: dict[Part, set[int]] = {}
    for part, record in (record for draft in drafts for example in draft.examples for record in example):
        wanted.setdefault(part, set()).add(record)
    found = {part: places(part, records, ticker.record) for part, records in wanted.items()}
    return [replace(draft.finding, examples=draft.finding.examples + _texts(draft, found)) for draft in drafts]


def _texts(draft: _Draft, found: dict[Part, dict[int, str]]) -> tuple[str, ...]:
    return tuple(f" {draft.words} ".join(found[part][record] for part, record in example) for example in draft.examples)


class _Ticker:
    """Says every few seconds how far the work is; silent for short work."""

    def __init__(self, say: Callable[[str], None], num_samples: int) -> None:
        self._say = say
        self._num_samples = num_samples
        self._done = self._read = 0
        self._spoke = time.monotonic()

    def samples(self, num: int) -> None:
        self._done += num
        self._maybe(f"{self._done / self._num_samples:.0%}, {self._done:,} of {self._num_samples:,} samples")

    def record(self) -> None:
        self._read += 1
        if self._read % 1000 == 0:
            self._maybe(f"looking up where the records stand, {self._read:,} read")

    def _maybe(self, text: str) -> None:
        now = time.monotonic()
        if now - self._spoke >= PROGRESS_SECONDS:
            self._spoke = now
            self._say(f"checking data: {text}")
