"""How even the spread over ranks is and how full packed rows are, on GSM8K and on a heavy-tailed set; no training.

    python benchmarks/data/balance.py --data gsm8k_train.jsonl

Beside ours: longest first (greedy) and round-robin. A load is bounded by the mean and by the largest sample alone:
updates in which that is more than 3 % above the mean are counted apart ("one sample"), and excess is over the mean.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from unisono.data.order import Order
from unisono.data.pack import batch_padded, pack
from unisono.data.spread import CostModel, spread

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
STARTER = CostModel(quadratic=1 / (12 * 576), target=49152 / (12 * 576 * 30))
WITHIN = 0.03


def longest_first(costs: Floats, world: int) -> Floats:
    """Return the ranks' loads of greedy scheduling."""
    loads = [0.0] * world
    for cost in -np.sort(-costs):
        heapq.heapreplace(loads, loads[0] + float(cost))
    return np.array(loads)


def round_robin(costs: Floats, world: int) -> Floats:
    """Return the loads when samples are dealt in their order."""
    return np.array([costs[rank::world].sum() for rank in range(world)])


def ours(costs: Floats, world: int) -> Floats:
    """Return the loads of our spread."""
    return np.array([costs[share].sum() for share in spread(costs, world)])


WAYS: dict[str, Callable[[Floats, int], Floats]] = {
    "ours": ours,
    "longest first": longest_first,
    "round-robin": round_robin,
}


def gsm8k(path: Path) -> tuple[Ints, Ints, str]:
    """Return tokens and targets of each record, and how they were counted (the template's few tokens left out)."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    texts = [[record[key] for record in records] for key in ("question", "answer")]
    cache = Path(os.environ.get("UNISONO_CACHE") or "~/.cache/unisono").expanduser()
    file = cache / "starter" / "SmolLM2-135M-Instruct" / "tokenizer.json"
    if file.exists():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
        parts = [np.array([len(x.ids) for x in tokenizer.encode_batch(column)]) for column in texts]
        how = "the starter's tokenizer"
    else:
        parts = [np.array([-(-len(text) // 4) for text in column]) for column in texts]
        how = "characters / 4: the starter's tokenizer is not in the cache"
    return parts[0] + parts[1], parts[1], how


def heavy_tailed(num_samples: int) -> tuple[Ints, Ints]:
    """Return lognormal tokens (median 400, sigma 1.2, at most 32,768) and half of them as targets."""
    lengths = np.random.default_rng(0).lognormal(np.log(400), 1.2, num_samples)
    tokens = np.clip(lengths.astype(np.int64), 8, 32_768)
    return tokens, tokens // 2


def updates_of(num_samples: int, size: int) -> list[Ints]:
    """Return the samples of every full update of three epochs."""
    order = Order([num_samples], global_size=size, global_tokens=None, seed=0)
    updates = [order.update(number).samples for number in range(1, order.num_updates(3) + 1)]
    return [samples for samples in updates if len(samples) == size]


def balance(name: str, costs: Floats) -> None:
    """Print a line for each number of ranks, global batch and way."""
    for world in (2, 4, 8):
        for size in (64, 128, 256, 512):
            batches = [costs[samples] for samples in updates_of(len(costs), size)]
            means = np.array([batch.sum() / world for batch in batches])
            bound = np.array([batch.max() for batch in batches]) > means * (1 + WITHIN)
            for way, loads in WAYS.items():
                excess = np.array([loads(batch, world).max() for batch in batches]) / means - 1
                free = excess[~bound]
                shown = (
                    f"{np.median(free):8.2%} {np.quantile(free, 0.95):8.2%} {free.max():8.2%} "
                    f"{(free <= WITHIN).mean():8.1%}"
                    if len(free)
                    else " " * 35
                )
                print(f"{name:12} {world:5} {size:6}  {way:14} {shown} {bound.sum():6} of {len(bound)}", flush=True)


def packing(name: str, lengths: Ints, budget: int) -> None:
    """Print the free share of packed rows, the last of an update left out, and the padding of padded batches.

    Rows are not padded, so what is free costs no compute; padding does.
    """
    rows = least = free = padded = 0
    room = 0
    for samples in updates_of(len(lengths), 512):
        tokens = lengths[samples]
        sums = sorted((int(tokens[row].sum()) for row in pack(tokens, budget)), reverse=True)
        full = [total for total in sums[:-1] if total <= budget]
        free += sum(budget - total for total in full)
        room += budget * len(full)
        rows, least = rows + len(sums), least - (-int(tokens.sum()) // budget)
        padded += sum(
            len(batch) * int(tokens[batch].max()) - int(tokens[batch].sum()) for batch in batch_padded(tokens, budget)
        )
    total = sum(int(lengths[samples].sum()) for samples in updates_of(len(lengths), 512))
    print(
        f"packing {name}, rows of {budget:,}: {free / room:.3%} free, {rows:,} rows (at least {least:,}); "
        f"padded batches: {padded / (padded + total):.2%} padding"
    )


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's training file")
    lengths, targets, how = gsm8k(parser.parse_args().data)
    print(f"GSM8K: {len(lengths):,} records, {lengths.sum():,} tokens by {how}")
    print(f"{'set':12} ranks  batch  {'way':14}   median     95 %    worst   <= 3 %  one sample")
    heavy, heavy_targets = heavy_tailed(len(lengths))
    balance("GSM8K", STARTER(lengths, targets))
    balance("heavy-tailed", STARTER(heavy, heavy_targets))
    for budget in (2048, 8192):
        packing("GSM8K", lengths, budget)
    packing("heavy-tailed", heavy, 32_768)


if __name__ == "__main__":
    main()
