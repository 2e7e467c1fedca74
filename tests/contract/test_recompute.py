"""Computing again in backward changes no bit, in any way of doing it and with everything that it goes with."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.ranks import run_ranks
from support.tiny import save_tiny
from support.updates import Settings, assert_same_step, assert_same_trace, train_updates

LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.1}
ADAMW = {"name": "adamw", "lr": 1e-3, "schedule": "constant", "warmup": 0, "max_grad_norm": 1.0}
RUN = Settings(optim=ADAMW, updates=2, global_size=4, micro_tokens=30)
WAYS = ("selective", "full", "offload")
VARIANTS = {
    "fp32": RUN,
    "bf16": replace(RUN, compute="bf16"),
    "adapters": replace(RUN, compute="bf16", lora=LORA),
    "adapters on 4 bits": replace(RUN, compute="bf16", lora=LORA, quantize="nf4"),
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Products of 256 terms and more, which the selective way keeps."""
    return save_tiny(tmp_path_factory.mktemp("wide") / "model", hidden_size=256, intermediate_size=320)


@pytest.mark.parametrize(("world", "strategy"), [(1, "single"), (2, "ddp"), (2, "fsdp2")])
def test_the_same_bits(wide: Path, world: int, strategy: str) -> None:
    runs = [
        replace(each, strategy=strategy, checkpointing=way) for each in VARIANTS.values() for way in ("none", *WAYS)
    ]
    traces = run_ranks(train_updates, world, wide, *runs)[0]
    for first in range(0, len(runs), 1 + len(WAYS)):
        plain, *again = traces[first : first + 1 + len(WAYS)]
        for trace in again:
            assert_same_step(trace, plain, tolerance=0.0)
            assert_same_trace(trace, plain, tolerance=0.0)


def count_operations(rank: int, world: int, folder: Path, settings: Settings) -> Counter[str]:
    """Train and count operations by name, products by whether they have the terms to be worth keeping."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: Counter[str] = Counter()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            short = "mm.default" in str(func) and args[-1].shape[0] < 256
            self.seen[f"{func}{' of few terms' if short else ''}"] += 1
            return func(*args, **(kwargs or {}))

    with Counting() as counting:
        train_updates(rank, world, folder, settings)
    return counting.seen


def test_the_selective_way_does_the_cheap_things_again_only(wide: Path) -> None:
    """No product with many terms and no attention is computed twice; norms are. Computing all again does both."""
    run = replace(RUN, updates=1, attention="sdpa")
    none, selective, full = (
        run_ranks(count_operations, 1, wide, replace(run, checkpointing=way))[0]
        for way in ("none", "selective", "full")
    )
    attention = next(name for name in none if "scaled_dot_product" in name and "backward" not in name)
    for costly in ("aten.mm.default", attention):
        assert none[costly] == selective[costly] < full[costly], costly
    assert none["aten.rsqrt.default"] < selective["aten.rsqrt.default"] == full["aten.rsqrt.default"]
    kept, again = (
        run_ranks(count_operations, 1, wide, replace(run, lora=LORA, checkpointing=way))[0][
            "aten.mm.default of few terms"
        ]
        for way in ("none", "selective")
    )
    assert kept < again, "those of adapters"


def keep_on_host(rank: int, world: int, folder: Path, settings: Settings) -> list[tuple[int, ...]]:
    """Train and return the shapes of what was sent to the host."""
    from unisono.model import recompute

    sent = []
    original = recompute.to_host

    def watched(tensor: Any) -> Any:
        sent.append(tuple(tensor.shape))
        return original(tensor)

    recompute.to_host = watched
    train_updates(rank, world, folder, settings)
    return sent


def test_what_waits_on_the_host_are_the_inputs_of_blocks(wide: Path) -> None:
    """Two blocks, one micro-batch of all 8 samples; the other thing is a dummy of checkpointing's own, of no values."""
    sent = run_ranks(keep_on_host, 1, wide, Settings(checkpointing="offload"))[0]
    tokens = sum(map(sum, Settings().shapes))
    assert [shape for shape in sent if len(shape) == 3] == [(1, tokens, 256)] * 2
    assert all(shape in {(0,), (1, tokens, 256)} for shape in sent)
