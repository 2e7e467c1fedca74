"""Show samples as the model will see them, with what is learned in colour."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text as RichText

from unisono.data.lengths import count_lengths, lines_of
from unisono.data.prepare import Prepared
from unisono.data.store import TokenStore
from unisono.data.template import load_tokenizer

_TARGET_STYLE = "bold green"
_CONTEXT_STYLE = "dim"


def show(
    prepared: Prepared,
    tokenizer_dir: Path,
    *,
    trust_remote_code: bool = False,
    number: int = 3,
    console: Console | None = None,
) -> None:
    """Print ``number`` training samples with their targets marked, the lengths and where the records went.

    Where there are colours targets are green; elsewhere they stand between ``⟦`` and ``⟧``.
    """
    out = console or Console()
    tokenizer = load_tokenizer(tokenizer_dir, trust_remote_code=trust_remote_code)
    store = prepared.store
    brackets = out.no_color or out.color_system is None
    for index in range(min(number, len(store))):
        record, length, num_targets = _head(store, index)
        out.rule(f"record {record}: {length} tokens, {num_targets} targets")
        out.print(_coloured(tokenizer, store, index, brackets=brackets), soft_wrap=True)
    out.rule("lengths in tokens")
    for line in lines_of(count_lengths([store]).summary()):
        out.print(line, markup=False, highlight=False)
    out.rule()
    for line in prepared.messages:
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def as_json(
    prepared: Prepared, tokenizer_dir: Path, *, trust_remote_code: bool = False, number: int = 3
) -> dict[str, Any]:
    """Give the same as an object whose keys stay.

    ``samples``: ``record`` (number in the source order, from 0), ``tokens``, ``targets``, ``ids`` and ``runs``, the
    pieces that are all context or all targets: ``begin`` and ``end`` (tokens), ``is_target``, ``text``. ``lengths``:
    the ranges ``begin`` to ``end - 1`` tokens with their ``samples``. ``messages``: where the records went.
    """
    tokenizer = load_tokenizer(tokenizer_dir, trust_remote_code=trust_remote_code)
    store = prepared.store
    samples = []
    for index in range(min(number, len(store))):
        record, length, num_targets = _head(store, index)
        samples.append(
            {
                "record": record,
                "tokens": length,
                "targets": num_targets,
                "ids": store.sample(index)[0].tolist(),
                "runs": [
                    {"begin": begin, "end": end, "is_target": is_target, "text": text}
                    for begin, end, is_target, text in _runs(tokenizer, store, index)
                ],
            }
        )
    lengths = [asdict(one) for one in count_lengths([store]).bins()]
    return {"version": 1, "samples": samples, "lengths": lengths, "messages": list(prepared.messages)}


def _head(store: TokenStore, index: int) -> tuple[int, int, int]:
    """Return a sample's record, tokens and targets."""
    this = np.array([index])
    return int(store.record[this][0]), int(store.lengths[this][0]), int(store.num_targets[this][0])


def _runs(tokenizer: Any, store: TokenStore, index: int) -> list[tuple[int, int, bool, str]]:
    """Decode a sample run by run: begin, end, whether they are targets, text."""
    ids, is_target = store.sample(index)
    borders = [0, *(np.flatnonzero(np.diff(is_target)) + 1).tolist(), len(ids)]
    return [
        (
            begin,
            end,
            bool(is_target[begin]),
            tokenizer.decode(ids[begin:end].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False),
        )
        for begin, end in pairwise(borders)
    ]


def _coloured(tokenizer: Any, store: TokenStore, index: int, *, brackets: bool) -> RichText:
    """Put a sample together: context, targets, context ..."""
    text = RichText()
    for _, _, is_target, decoded in _runs(tokenizer, store, index):
        if is_target:
            text.append(f"⟦{decoded}⟧" if brackets else decoded, _TARGET_STYLE)
        else:
            text.append(decoded, _CONTEXT_STYLE)
    return text
