"""Look at every token of some prepared samples once, some megabytes at a time.

Kept are 32 bytes a sample, the hashes that copies are found by, and the first few samples of each kind that is looked
for; so memory follows the number of samples and not their tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from unisono.data.sets import SampleSet
from unisono.data.store import Flags, Ids, Ints, Piece

NUM_EXAMPLES = 5
SHORT_TARGETS = 2
FEW_TARGETS_SHARE = 0.01
# 16 bytes each; numpy compares such texts byte by byte, and all have the same length.
Hashes = npt.NDArray[np.bytes_]
_HASH_BYTES = 16


@dataclass
class Hits:
    """How many samples are of a kind, and the numbers of the first few."""

    num: int = 0
    first: list[int] = field(default_factory=list)

    def add(self, mask: Flags, begin: int) -> None:
        """Count the samples of a block that starts at sample ``begin``."""
        self.num += int(np.count_nonzero(mask))
        if len(self.first) < NUM_EXAMPLES:
            self.first += (np.flatnonzero(mask)[: NUM_EXAMPLES - len(self.first)] + begin).tolist()


@dataclass(frozen=True, eq=False)
class Special:
    """A tokenizer's special tokens: ``flags`` by id, the end token's id, and what they look like in a text."""

    flags: Flags
    end: int | None
    texts: tuple[str, ...]

    @staticmethod
    def of(tokenizer: Any) -> Special:
        """Ask a tokenizer of transformers."""
        added = tokenizer.added_tokens_decoder
        ids = {*tokenizer.all_special_ids, *(number for number, token in added.items() if token.special)}
        flags = np.zeros(max(len(tokenizer), *(number + 1 for number in ids), 1), np.bool_)
        flags[sorted(ids)] = True
        texts = sorted(map(str, tokenizer.convert_ids_to_tokens(sorted(ids))), key=len, reverse=True)
        return Special(flags, tokenizer.eos_token_id, tuple(texts))


@dataclass(frozen=True, eq=False)
class Scan:
    """What was seen of some sets laid end to end; samples are numbered over all of them.

    whole: hash of ids and targets. prompt: hash of what precedes the first target; empty where that is not more than a
    beginning token. short: at most two targets that are no special token. few: under 1 % of the tokens are targets.
    early: an end marker with more of the answer behind it.
    """

    sets: tuple[SampleSet, ...]
    whole: Hashes
    prompt: Hashes
    short: Hits
    few: Hits
    early: Hits

    @property
    def num_samples(self) -> int:
        """Count the samples."""
        return len(self.whole)

    def locate(self, sample: int) -> tuple[SampleSet, int]:
        """Return a sample's set and the number of its record there."""
        for one in self.sets:
            if sample < len(one.store):
                return one, int(one.store.record[sample])
            sample -= len(one.store)
        raise IndexError(f"there are {self.num_samples} samples")


def scan(sets: Sequence[SampleSet], special: Special, tick: Callable[[int], None]) -> Scan:
    """Look at all samples; ``tick`` is told how many have been done since it was last called."""
    num_samples = sum(len(one.store) for one in sets)
    seen = Scan(
        sets=tuple(sets),
        whole=np.empty(num_samples, f"S{_HASH_BYTES}"),
        prompt=np.empty(num_samples, f"S{_HASH_BYTES}"),
        short=Hits(),
        few=Hits(),
        early=Hits(),
    )
    begin = 0
    for one in sets:
        # With every token a target, the end of a turn is within what is learned, as it should be.
        ends_mean_end = one.part.job.targets != "all" or one.part.summary["shape"] == "text"
        markers: Flags | None = None
        for piece in one.store.pieces():
            layout = _Layout(piece)
            if markers is None:
                markers = _markers(piece, layout, special)
            end = begin + len(layout.starts)
            _hash(piece, layout, seen.whole[begin:end], seen.prompt[begin:end])
            content = piece.is_target & ~special.flags[piece.ids]
            seen.short.add(np.add.reduceat(content, layout.starts, dtype=np.int64) <= SHORT_TARGETS, begin)
            seen.few.add(layout.num_targets < FEW_TARGETS_SHARE * layout.lengths, begin)
            if ends_mean_end:
                seen.early.add(_has_early_end(piece, layout, markers, content), begin)
            tick(end - begin)
            begin = end
    return seen


class _Layout:
    """Where the samples of a piece lie: first token, tokens, targets, and how many tokens precede the first target."""

    def __init__(self, piece: Piece) -> None:
        self.lengths: Ints = piece.index[:, 0]
        self.num_targets: Ints = piece.index[:, 1]
        self.starts: Ints = np.cumsum(self.lengths) - self.lengths
        places = np.flatnonzero(piece.is_target)
        first = np.append(places, len(piece.ids))[np.searchsorted(places, self.starts)]
        self.num_prompt: Ints = np.where(self.num_targets > 0, first - self.starts, self.lengths)


def _markers(piece: Piece, layout: _Layout, special: Special) -> Flags:
    """Flag the special tokens that samples end with, and the tokenizer's end token."""
    flags = np.zeros(len(special.flags), np.bool_)
    targets = np.flatnonzero(piece.is_target)
    after = np.searchsorted(targets, layout.starts + layout.lengths)
    last = piece.ids[targets[after[layout.num_targets > 0] - 1]]
    flags[last[special.flags[last]]] = True
    if special.end is not None:
        flags[special.end] = True
    return flags


def _has_early_end(piece: Piece, layout: _Layout, markers: Flags, content: Flags) -> Flags:
    # The first token of a sample is no target, so a pair of neighbours never belongs to two samples.
    early = np.zeros(len(piece.ids), np.bool_)
    early[:-1] = piece.is_target[:-1] & markers[piece.ids[:-1]] & content[1:]
    return np.logical_or.reduceat(early, layout.starts)


def _hash(piece: Piece, layout: _Layout, whole: Hashes, prompt: Hashes) -> None:
    """Write a piece's hashes."""
    ids, flags = _bytes_of(piece.ids), _bytes_of(piece.is_target)
    wholes, prompts = [], []
    ends = layout.starts + layout.lengths
    for start, end, num_prompt in zip(layout.starts.tolist(), ends.tolist(), layout.num_prompt.tolist()):
        digest = hashlib.blake2b(ids[4 * start : 4 * end], digest_size=_HASH_BYTES)
        digest.update(flags[start:end])
        wholes.append(digest.digest())
        before = ids[4 * start : 4 * (start + num_prompt)]
        has_prompt = 1 < num_prompt < end - start
        prompts.append(hashlib.blake2b(before, digest_size=_HASH_BYTES).digest() if has_prompt else bytes(_HASH_BYTES))
    whole[:] = np.frombuffer(b"".join(wholes), whole.dtype)
    prompt[:] = np.frombuffer(b"".join(prompts), prompt.dtype)


def _bytes_of(array: Ids | Flags) -> memoryview:
    return np.ascontiguousarray(array).data.cast("B")
