"""Show samples as the model will see them, with what is learned in colour."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text as RichText

from unisono.config.schema import DataSection
from unisono.data.prepare import prepare
from unisono.data.store import Ints, TokenStore
from unisono.data.template import load_tokenizer

_TARGET_STYLE = "bold green"
_CONTEXT_STYLE = "dim"
_NUM_BINS = 10
_BAR_WIDTH = 40


def show(
    data: DataSection,
    tokenizer_dir: Path,
    *,
    max_length: int,
    trust_remote_code: bool = False,
    number: int = 3,
    console: Console | None = None,
) -> None:
    """Print ``number`` training samples with their targets marked, the lengths and where the records went.

    Where there are colours targets are green; elsewhere they stand between ``⟦`` and ``⟧``.
    """
    out = console or Console()
    prepared = prepare(
        data,
        tokenizer_dir,
        max_length=max_length,
        trust_remote_code=trust_remote_code,
        progress=lambda line: out.print(line, markup=False, highlight=False),
    )
    tokenizer = load_tokenizer(tokenizer_dir, trust_remote_code=trust_remote_code)
    store = prepared.store
    brackets = out.no_color or out.color_system is None
    everything = np.arange(len(store))
    for index in range(min(number, len(store))):
        this = everything[index : index + 1]
        record, length, num_targets = (
            int(column[this][0]) for column in (store.record, store.lengths, store.num_targets)
        )
        head = f"record {record}: {length} tokens, {num_targets} targets"
        out.rule(head)
        out.print(_coloured(tokenizer, store, index, brackets=brackets), soft_wrap=True)
    out.rule("lengths in tokens")
    for line in histogram(store.lengths[everything]):
        out.print(line, markup=False, highlight=False)
    out.rule()
    for line in prepared.messages:
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def _coloured(tokenizer: Any, store: TokenStore, index: int, *, brackets: bool) -> RichText:
    """Decode a sample run by run: context, targets, context ..."""
    ids, is_target = store.sample(index)
    borders = np.flatnonzero(np.diff(is_target)) + 1
    text = RichText()
    for run, flags in zip(np.split(ids, borders), np.split(is_target, borders)):
        decoded = tokenizer.decode(run.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if flags[0]:
            text.append(f"⟦{decoded}⟧" if brackets else decoded, _TARGET_STYLE)
        else:
            text.append(decoded, _CONTEXT_STYLE)
    return text


def histogram(lengths: Ints) -> list[str]:
    """Draw how many samples have which length, one line for each of ten ranges, then median, 95 % and longest."""
    low, high = int(lengths.min()), int(lengths.max())
    num_bins = min(_NUM_BINS, high - low + 1)
    edges = np.linspace(low, high + 1, num_bins + 1).astype(int)
    counts, _ = np.histogram(lengths, edges)
    width = len(f"{high:,}")
    lines = [
        f"{begin:>{width},} to {end - 1:>{width},}  {_bar(count / max(counts))} {count:,}"
        for begin, end, count in zip(edges[:-1], edges[1:], counts)
    ]
    median, p95 = np.percentile(lengths, [50, 95])
    lines.append(f"median {median:,.0f}, 95 % up to {p95:,.0f}, longest {high:,}, mean {lengths.mean():,.1f}")
    return lines


def _bar(share: float) -> str:
    return f"{'█' * round(_BAR_WIDTH * share):<{_BAR_WIDTH}}"
