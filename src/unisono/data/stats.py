"""What the data of a run amounts to: records, samples, tokens, lengths, the mix, updates. Changes nothing.

Everything is counted from the prepared stores, a block at a time. The fields of the classes here are the keys of
``unisono data stats --json``; ``version`` grows when one of them changes its meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unisono.data.job import Counts
from unisono.data.lengths import Lengths, LengthStats, blocks, count_lengths
from unisono.data.order import Order
from unisono.data.prepare import Prepared
from unisono.data.sets import SampleSet, training_sets, validation_sets
from unisono.data.store import Store

STATS_VERSION = 1


@dataclass(frozen=True)
class SetStats:
    """One source, one validation set, or all sources together (``train``, without a name).

    records = kept + to_validation + dropped_overlong + dropped_no_target + skipped_bad. to_validation: kept, but for
    validation (a share). A validation set that is a share has kept records only; what was left out stands at its
    source, and so do cut_prompts (prompts that lost their beginning) and open_answers (answers without end marker) of
    both. samples, tokens and targets are the set's own. targets_share: of the tokens. context_share: tokens of a sample
    on average, of data.max_length. store_bytes: the tokens on disk, of this set alone.
    """

    kind: str
    name: str
    formats: list[str]
    files: int
    records: int
    kept: int
    to_validation: int
    dropped_overlong: int
    dropped_no_target: int
    skipped_bad: int
    cut_prompts: int
    open_answers: int
    samples: int
    tokens: int
    targets: int
    targets_share: float
    context_share: float
    lengths: LengthStats
    ignored_fields: list[str]
    stores: list[str]
    store_bytes: int
    left_out_files: list[str]


@dataclass(frozen=True)
class MixStats:
    """What a source is of an epoch, on average over epochs. passes: how often each of its samples is seen."""

    name: str
    passes: float
    samples: float
    tokens: float
    samples_share: float
    tokens_share: float


@dataclass(frozen=True)
class EpochStats:
    """One epoch: samples and tokens on average over epochs, updates of the first one."""

    samples: float
    tokens: float
    updates: int
    samples_per_update: float
    tokens_per_update: float


@dataclass(frozen=True)
class RunStats:
    """The whole run; samples, tokens and (with ``length.updates``) epochs are what its updates amount to on average."""

    updates: int
    epochs: float
    samples: float
    tokens: float


@dataclass(frozen=True)
class Stats:
    """All of it. context_tokens: what the model can attend to; max_length: what a sample may have."""

    version: int
    context_tokens: int
    max_length: int
    train: SetStats
    sources: list[SetStats]
    validation: list[SetStats]
    mix: list[MixStats]
    epoch: EpochStats
    run: RunStats


def gather(prepared: Prepared, order: Order, *, context_tokens: int, epochs: int | None, updates: int | None) -> Stats:
    """Count everything; one of ``epochs`` and ``updates`` says how long the run is."""
    sets = training_sets(prepared)
    max_length = sets[0].part.job.max_length
    lengths = [count_lengths([one.store]) for one in sets]
    sources = [_set_stats([one], counted, max_length) for one, counted in zip(sets, lengths)]
    validation = [_set_stats([one], count_lengths([one.store]), max_length) for one in validation_sets(prepared)]
    mix = _mix(sources, prepared.weights)
    epoch = _epoch(mix, order.num_updates(1))
    return Stats(
        version=STATS_VERSION,
        context_tokens=context_tokens,
        max_length=max_length,
        train=_set_stats(sets, count_lengths([one.store for one in sets]), max_length),
        sources=sources,
        validation=validation,
        mix=mix,
        epoch=epoch,
        run=_run(epoch, order, epochs, updates),
    )


def _set_stats(sets: Sequence[SampleSet], lengths: Lengths, max_length: int) -> SetStats:
    """Count one set, or several of a kind together."""
    counts = sum((_counts(one) for one in sets), Counts())
    targets = sum(_num_targets(one.store) for one in sets)
    parts = [one.part for one in sets]
    return SetStats(
        kind=sets[0].kind,
        name=sets[0].name if len(sets) == 1 else "",
        formats=list(dict.fromkeys(str(part.summary["shape"]) for part in parts)),
        files=sum(len(part.job.files) for part in parts),
        records=counts.records,
        kept=counts.kept - counts.kept_validation,
        to_validation=counts.kept_validation,
        dropped_overlong=counts.dropped_overlong,
        dropped_no_target=counts.dropped_no_target,
        skipped_bad=counts.skipped_bad,
        cut_prompts=counts.cut_prompts,
        open_answers=counts.open_answers,
        samples=lengths.num_samples,
        tokens=lengths.num_tokens,
        targets=targets,
        targets_share=targets / lengths.num_tokens,
        context_share=lengths.mean / max_length,
        lengths=lengths.summary(),
        ignored_fields=sorted({name for part in parts for name in part.summary["ignored"]}),
        stores=[str(one.store.folder) for one in sets],
        store_bytes=sum(_num_bytes(one.store.folder) for one in sets),
        left_out_files=[
            str(one.part.folder / "left_out.jsonl")
            for one in sets
            if one.part.summary["num_left_out"] and not one.is_share
        ],
    )


def _counts(one: SampleSet) -> Counts:
    """Return where a set's records went; of a share only what it got is known."""
    counts = one.part.counts
    return Counts(records=counts.kept_validation, kept=counts.kept_validation) if one.is_share else counts


def _num_targets(store: Store) -> int:
    return sum(int(store.num_targets[block].sum()) for block in blocks(len(store)))


def _num_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _mix(sources: Sequence[SetStats], weights: Sequence[float]) -> list[MixStats]:
    samples = [weight * source.samples for weight, source in zip(weights, sources)]
    tokens = [weight * source.tokens for weight, source in zip(weights, sources)]
    return [
        MixStats(
            name=source.name,
            passes=weight,
            samples=samples[i],
            tokens=tokens[i],
            samples_share=samples[i] / sum(samples),
            tokens_share=tokens[i] / sum(tokens),
        )
        for i, (source, weight) in enumerate(zip(sources, weights))
    ]


def _epoch(mix: Sequence[MixStats], num_updates: int) -> EpochStats:
    samples, tokens = sum(source.samples for source in mix), sum(source.tokens for source in mix)
    return EpochStats(samples, tokens, num_updates, samples / num_updates, tokens / num_updates)


def _run(epoch: EpochStats, order: Order, epochs: int | None, updates: int | None) -> RunStats:
    num_updates = updates or order.num_updates(epochs or 1)
    num_epochs = epochs or num_updates / epoch.updates
    return RunStats(num_updates, num_epochs, num_epochs * epoch.samples, num_epochs * epoch.tokens)
