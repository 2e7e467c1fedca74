"""Attention of one document on a CPU: torch's fused kernel beside three batched products, forward and backward.

python benchmarks/attention.py [heads [key heads [head width]]]

Milliseconds of the fastest of some turns, one thread, bf16; the two take turns. It is why
``unisono.model.products.LONGEST`` is what it is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from unisono.model.products import ShortAttention

TURNS, CALLS = 5, 8


def fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """As ``document_attention`` calls it where products are not taken."""
    groups = len(query) // len(key)
    key, value = (x.repeat_interleave(groups, dim=0) for x in (key, value))
    return F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True)[0]


def products(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Ours."""
    output: torch.Tensor = ShortAttention.apply(query, key, value, None)
    return output


def milliseconds(way: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], grad: torch.Tensor) -> float:
    """Return the mean of a few calls, forward and backward."""
    begin = time.perf_counter()
    for _ in range(CALLS):
        way(*inputs).backward(grad)
    return (time.perf_counter() - begin) / CALLS * 1e3


def main() -> None:
    """Print the table."""
    heads, key_heads, width = (int(x) for x in [*sys.argv[1:4], *("9", "3", "64")[len(sys.argv) - 1 :]])
    torch.set_num_threads(1)
    print(f"{heads} heads, {key_heads} key heads, {width} wide, bf16\ntokens  fused ms  products ms  times faster")
    for tokens in (32, 64, 128, 200, 256, 384, 512, 768, 1024):
        q, k, v = (torch.randn(n, tokens, width).bfloat16().requires_grad_() for n in (heads, key_heads, key_heads))
        grad = torch.randn(heads, tokens, width).bfloat16()
        times = [[milliseconds(way, (q, k, v), grad) for way in (fused, products)] for _ in range(TURNS + 1)][1:]
        best = [min(column) for column in zip(*times)]
        print(f"{tokens:6d}  {best[0]:8.2f}  {best[1]:11.2f}  {best[0] / best[1]:12.2f}", flush=True)


if __name__ == "__main__":
    main()
