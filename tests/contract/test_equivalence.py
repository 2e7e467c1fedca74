"""One model, however it is trained: world size, micro-batch, packing, adapters, tied embeddings, strategy.

The reference is one process that trains each update as one padded batch with transformers' own attention.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from support.ranks import run_ranks
from support.updates import Settings, Trace, assert_same_step, assert_same_trace, train_updates

VARIANTS = {
    "full": Settings(),
    "lora": Settings(lora={"rank": 4, "alpha": 8.0}),
    "checkpointing": Settings(lora={"rank": 4, "alpha": 8.0}, checkpointing="full", updates=3),
}
CUTS = {
    "packed in one": {},
    "packed in rows of 24 tokens": {"micro_tokens": 24},
    "one sample at a time": {"micro_tokens": 1},
    "padded": {"packed": False, "micro_tokens": 40},
    "padded, sdpa": {"packed": False, "attention": "sdpa", "micro_tokens": 24},
    "packed, sdpa": {"attention": "sdpa", "micro_tokens": 24},
    "packed, eager": {"attention": "eager"},
}
LONG = Settings(
    shapes=[(p, a) for p in (1, 3, 8) for a in (1, 2, 5, 9, 17)] + [(0, 12), (30, 1)],
    updates=20,
    global_size=5,
    optim={"name": "adamw", "lr": 1e-3, "schedule": "cosine", "warmup": 3, "max_grad_norm": 1.0},
)


@cache
def reference(folder: Path) -> dict[str, Trace]:
    """All variants trained the plainest way."""
    runs = [replace(s, packed=False, attention="sdpa") for s in [*VARIANTS.values(), LONG]]
    traces = run_ranks(train_updates, 1, folder, *runs)[0]
    return dict(zip([*VARIANTS, "long"], traces, strict=True))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_one_update_is_the_same_however_it_is_cut(tiny: Path, world: int) -> None:
    settings = [replace(v, **cut) for v in VARIANTS.values() for cut in CUTS.values()]
    names = [(v, cut) for v in VARIANTS for cut in CUTS]
    for traces in run_ranks(train_updates, world, tiny, *settings):
        for (variant, cut), trace in zip(names, traces, strict=True):
            expected = reference(tiny)[variant]
            assert trace.losses == pytest.approx(expected.losses, abs=1e-6), (variant, cut)
            assert_same_step(trace, expected)


def test_tied_embeddings(tiny_tied: Path) -> None:
    expected = run_ranks(train_updates, 1, tiny_tied, Settings(packed=False, attention="sdpa"))[0][0]
    assert sum("lm_head" in name or "embed" in name for name in expected.parameters) == 1
    for world in (1, 2):
        for (trace,) in run_ranks(train_updates, world, tiny_tied, Settings(micro_tokens=24)):
            assert_same_step(trace, expected)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_twenty_updates_have_the_same_losses(tiny: Path, world: int) -> None:
    """AdamW, cosine, clipping, epochs with a partial last update, and on 4 ranks one that has no sample at all."""
    for (trace,) in run_ranks(train_updates, world, tiny, replace(LONG, micro_tokens=48)):
        assert_same_trace(trace, reference(tiny)["long"], tolerance=1e-5)
        assert trace.ids == reference(tiny)["long"].ids
