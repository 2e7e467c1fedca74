"""The world: ranks, their device, and the few values they agree on.

One process needs no process group at all: every function here then answers without communication.
"""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class World:
    """This process's place: global rank of ``size``, and rank on its host."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """True on the one rank that writes files and speaks."""
        return self.rank == 0


def find_world() -> World:
    """Read the place torchrun gave this process; alone when it gave none. Needs no process group."""
    rank, size, local_rank, local_size = (
        int(os.environ.get(name, default))
        for name, default in (
            ("RANK", "0"),
            ("WORLD_SIZE", "1"),
            ("LOCAL_RANK", "0"),
            ("LOCAL_WORLD_SIZE", "1"),
        )
    )
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    return World(rank, size, local_rank, local_size, device)


def join(world: World, timeout_seconds: int) -> None:
    """Collective. Create the process group: nccl for GPUs beside gloo for CPU tensors, gloo alone otherwise."""
    if world.size == 1:
        return
    on_gpu = world.device.type == "cuda"
    settings: dict[str, Any] = {"device_id": world.device} if on_gpu else {}
    timeout = timedelta(seconds=timeout_seconds)
    if os.environ.get("MASTER_ADDR") == LOOPBACK and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        settings |= {"store": _loopback_store(world, timeout), "rank": world.rank, "world_size": world.size}
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timeout, **settings)


def _loopback_store(world: World, timeout: timedelta) -> Any:
    """Return the store where ranks of one host meet; torch's own would listen on every interface."""
    port = int(os.environ["MASTER_PORT"])
    listener = socket.create_server((LOOPBACK, port)).detach() if world.is_first else None
    return dist.TCPStore(  # type: ignore[attr-defined]
        LOOPBACK, port, world.size, is_master=world.is_first, timeout=timeout, master_listen_fd=listener
    )


def first_row(tensor: torch.Tensor) -> int:
    """Return which row of the whole tensor this rank's part begins with.

    torch cuts rows as ``torch.chunk`` does: pieces of one size, the last ones smaller or empty.
    """
    if not isinstance(tensor, DTensor):
        return 0
    cut = next(place for place, kind in enumerate(tensor.placements) if kind.is_shard())
    return tensor.device_mesh.get_local_rank(cut) * -(-tensor.shape[0] // tensor.device_mesh.size(cut))


def deal(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the rank that gets each of these sizes: the largest first, each to whoever has least; no communication.

    Equal sizes go in the order they come in: what is the same on all ranks is dealt out alike on all of them.
    """
    given, owners = [0] * ranks, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owners[place] = given.index(min(given))
        given[owners[place]] += sizes[place]
    return owners


def leave() -> None:
    """Destroy the process group.

    Callers drop models and optimizers first: gloo frees its last collectives in a thread of its own, which must not
    happen while the interpreter shuts down (pytorch issue 190489).
    """
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def second_group(world: World) -> dist.ProcessGroup | None:
    """Collective. Return another group of all ranks, for what a thread exchanges beside training; None for one rank."""
    return None if world.size == 1 else dist.new_group(backend="gloo")


def gather(values: Sequence[float], group: dist.ProcessGroup | None = None) -> list[list[float]]:
    """Collective. Return every rank's ``values``, in rank order, the same on all ranks."""
    mine = torch.tensor(values, dtype=torch.float64)
    if not dist.is_initialized():
        return [mine.tolist()]
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine, group=group)
    return [theirs.tolist() for theirs in everyone]


def gather_texts(text: str) -> list[str]:
    """Collective. Return every rank's ``text``, in rank order, the same on all ranks: texts travel as their bytes."""
    if not dist.is_initialized():
        return [text]
    data = text.encode()
    sizes = [int(size) for (size,) in gather([len(data)])]
    widest = max(1, *sizes)
    mine = torch.frombuffer(bytearray(data.ljust(widest, b"\0")), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(everyone, mine)
    return [theirs[:size].numpy().tobytes().decode() for theirs, size in zip(everyone, sizes)]


def agree(text: str) -> str:
    """Collective. Return rank 0's ``text`` on all ranks: decisions are values that are sent, never taken twice."""
    if not dist.is_initialized():
        return text
    size = torch.tensor([len(text.encode())])
    dist.broadcast(size, 0)
    data = torch.frombuffer(bytearray(text.encode().ljust(int(size), b"\0")[: int(size)] or b"\0"), dtype=torch.uint8)
    dist.broadcast(data, 0)
    return bytes(data[: int(size)].tolist()).decode()


def any_rank(answer: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Collective. Tell whether any rank says yes."""
    return any(theirs for (theirs,) in gather([float(answer)], group))


def wait_for_all() -> None:
    """Collective. Return when every rank has come here."""
    if dist.is_initialized():
        gather([0.0])
