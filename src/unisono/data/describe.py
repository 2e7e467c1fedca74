"""Put the statistics of the data into words, for a person at a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from unisono.data.lengths import lines_of
from unisono.data.stats import SetStats, Stats

_COLUMNS = ("", "records", "kept", "dropped", "skipped", "samples", "tokens", "targets", "median", "95 %", "longest")
_GAP = "  "


def describe(stats: Stats) -> list[str]:
    """Return the lines of ``unisono data stats``."""
    sets = [*stats.sources, *([stats.train] if len(stats.sources) > 1 else []), *stats.validation]
    lines = _table([_COLUMNS, *(_row(one, stats) for one in sets)])
    lines += ["", "training samples by their length in tokens", *lines_of(stats.train.lengths), ""]
    if len(stats.sources) > 1:
        lines += [*_table([("an epoch", "passes", "samples", "share", "tokens", "share"), *_mix_rows(stats)]), ""]
    return [*lines, *_sums(stats), *(line for one in [*stats.sources, *stats.validation] for line in _notes(one))]


def label(one: SetStats) -> str:
    """Name a set: train, train web, validation ..."""
    return f"{one.kind} {one.name}".rstrip()


def _row(one: SetStats, stats: Stats) -> tuple[str, ...]:
    return (
        "train, all" if one is stats.train and len(stats.sources) > 1 else label(one),
        f"{one.records:,}",
        f"{one.kept:,}",
        f"{one.dropped_overlong + one.dropped_no_target:,}",
        f"{one.skipped_bad:,}",
        f"{one.samples:,}",
        f"{one.tokens:,}",
        f"{one.targets_share:.1%}",
        f"{one.lengths.median:,.0f}",
        f"{one.lengths.p95:,.0f}",
        f"{one.lengths.longest:,}",
    )


def _mix_rows(stats: Stats) -> Iterator[tuple[str, ...]]:
    for source in stats.mix:
        yield (
            source.name,
            f"{source.passes:g}",
            f"{source.samples:,.0f}",
            f"{source.samples_share:.1%}",
            f"{source.tokens:,.0f}",
            f"{source.tokens_share:.1%}",
        )


def _sums(stats: Stats) -> list[str]:
    epoch, run = stats.epoch, stats.run
    return [
        f"epoch: {epoch.samples:,.0f} samples, {epoch.tokens:,.0f} tokens, {epoch.updates:,} updates"
        f" of about {epoch.samples_per_update:,.0f} samples and {epoch.tokens_per_update:,.0f} tokens",
        f"run: {run.updates:,} updates, {run.epochs:,.4g} epochs, about {run.samples:,.0f} samples"
        f" and {run.tokens:,.0f} tokens",
        f"context: a sample uses {stats.train.context_share:.1%} of data.max_length {stats.max_length:,} on average"
        f" (the model's context is {stats.context_tokens:,})",
    ]


def _notes(one: SetStats) -> Iterator[str]:
    """Say what stands out of a set: where records went and why, and where its tokens lie."""
    name = label(one)
    yield f"{name}: {_several(one.files, 'file')}, records of the shape {', '.join(one.formats)}"
    if one.to_validation:
        yield f"{name}: {one.to_validation:,} of the records are for validation, chosen by their content"
    for count, what in (
        (one.dropped_overlong, "records dropped: longer than data.max_length"),
        (one.dropped_no_target, "records dropped: without a target"),
        (one.skipped_bad, "records skipped: they cannot be used"),
        (one.cut_prompts, "prompts lost their beginning to fit data.max_length"),
        (one.open_answers, "answers have no end marker"),
    ):
        if count:
            yield f"{name}: {count:,} {what}"
    for file in one.left_out_files:
        yield f"{name}: what was left out is listed in {file}"
    if one.ignored_fields:
        yield f"{name}: fields that play no part: {', '.join(one.ignored_fields)}"
    yield f"{name}: {one.store_bytes / 1e6:,.1f} MB of tokens in {', '.join(one.stores)}"


def _several(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns: the first one to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        _GAP.join(f"{cell:>{width}}" if i else f"{cell:<{width}}" for i, (cell, width) in enumerate(zip(row, widths)))
        for row in rows
    ]
