"""One rank of the doctor's exchange: ``python -m unisono.doctor.exchange_rank RANK WORLD PORT BACKEND``.

Prints the seconds of one all-reduce of 16 MiB, once its sum was found right.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

NUMBERS = 4 << 20  # fp32: 16 MiB


def main(rank: int, world: int, port: int, backend: str) -> None:
    """Meet the other ranks, add up once to warm up and once on the clock."""
    import torch
    import torch.distributed as dist

    limit = timedelta(seconds=20)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=world, timeout=limit)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    for _ in range(2):
        numbers = torch.full((NUMBERS,), float(rank + 1), device=device)
        start = time.perf_counter()
        dist.all_reduce(numbers)
        low, high = numbers.min().item(), numbers.max().item()
        seconds = time.perf_counter() - start
    needed = world * (world + 1) / 2
    if (low, high) != (needed, needed):
        raise ValueError(f"the sum is {low} to {high}; {needed} is right")
    dist.barrier()
    print(seconds)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort the interpreter's own way out, and the work is done
