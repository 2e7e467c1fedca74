"""One model, however it is trained: world size, micro-batch, packing, adapters, tied embeddings."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from support.ranks import run_ranks
from support.updates import Settings, Trace, assert_same_step, assert_same_trace, train_updates


@cache
def reference(folder: Path, key: str) -> Trace:
    """One process, everything in one padded batch, transformers' own attention: nothing of ours to go wrong."""
    return run_ranks(train_updates, 1, folder, Settings(packed=False, attention="sdpa", **VARIANTS[key]))[0]


VARIANTS: dict[str, dict[str, object]] = {
    "full": {},
    "lora": {"lora": {"rank": 4, "alpha": 8.0}},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_one_update_is_the_same(tiny: Path, world: int, packed: bool, variant: str) -> None:
    settings = Settings(packed=packed, micro_tokens=24, **VARIANTS[variant])
    for trace in run_ranks(train_updates, world, tiny, settings):
        assert_same_step(trace, reference(tiny, variant))
        assert trace.losses == pytest.approx(reference(tiny, variant).losses, abs=1e-6)
