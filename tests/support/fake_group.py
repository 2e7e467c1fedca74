"""One rank of many that are not there: torch's fake process group does as if the others had answered.

Everything on this rank is real: model, strategy, backward, optimizer. What it hands to the group is written down.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.config.schema import LoraSection, ModelSection, OptimSection, StrategySection

KINDS = {
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "broadcast_": "broadcast",
}
SILENT = {"_wrap_tensor_autograd", "wait_tensor"}  # send nothing


@dataclass(frozen=True)
class Case:
    """An update to look at."""

    strategy: str
    ranks: int
    compute: str = "fp32"
    weights: str = "fp32"
    lora: int | None = None
    checkpointing: bool = False
    share_optimizer: bool = False
    shard_ranks: int | None = None
    keeps_gathered: bool = False
    exchange: Any = "update"
    num_micro: int = 1
    bucket_mib: int = 1


def take_updates(_rank: int, _world: int, folder: Path, *cases: Case) -> list[list[tuple[str, int, int]]]:
    """Return (kind, bytes, ranks) of every collective of an update, in order, for each case; see ``watch``."""
    return [watch(case, folder) for case in cases]


def watch(case: Case, folder: Path) -> list[tuple[str, int, int]]:
    """Take updates as rank 0 of a case's ranks; return those of the third: in the second, ddp rebuilds its buckets."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    ranks = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": case.ranks, "LOCAL_WORLD_SIZE": 8}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    dist.init_process_group("fake", rank=0, world_size=case.ranks, store=FakeStore())
    try:
        return _train(case, folder)
    finally:
        dist.destroy_process_group()


def _train(case: Case, folder: Path) -> list[tuple[str, int, int]]:
    import numpy as np

    from support.updates import make_store
    from unisono import dist
    from unisono.build import load_and_shard
    from unisono.data.collate import collate
    from unisono.optim import build_optimizer
    from unisono.precision import DTYPES, Precision
    from unisono.resume import trainable
    from unisono.step import take_update
    from unisono.strategy import choose

    world = dist.find_world()
    section = StrategySection(
        name=case.strategy,
        share_optimizer=case.share_optimizer,
        shard_ranks=case.shard_ranks,
        reshard_after_forward=not case.keeps_gathered,
        exchange=case.exchange,
        bucket_mib=case.bucket_mib,
    )
    model = ModelSection(
        path=str(folder),
        lora=None if case.lora is None else LoraSection(rank=case.lora),
        activation_checkpointing=case.checkpointing,
    )
    strategy = choose(section, world.size, DTYPES[case.compute])
    _, training, wrapped = load_and_shard(model, folder, strategy, world, weights=DTYPES[case.weights], seed=0)
    optimizer = build_optimizer(OptimSection(), trainable(training))
    strategy.bind(optimizer)
    batch = collate(make_store([(3, 5)] * 2), np.arange(2), packed=True)
    for _ in range(3):
        with _recorder() as seen:
            take_update(
                wrapped,
                [batch] * case.num_micro,
                num_targets=10 * case.num_micro * world.size,
                strategy=strategy,
                optimizer=optimizer,
                precision=Precision(case.compute, world.device),
                world=world,
                rate=1e-3,
                max_grad_norm=1.0,
            )
    return seen.collectives


def _recorder() -> Any:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    class Done:
        """A fake all-reduce says that it is done, but not what came of it: it is what was handed in."""

        def __init__(self, tensor: torch.Tensor) -> None:
            self._tensor = tensor

        def get_future(self) -> Any:
            future: Any = torch.futures.Future()
            future.set_result([self._tensor])
            return future

    class Recorder(TorchDispatchMode):
        """Writes down what goes to a process group; refuses what it does not know."""

        def __init__(self) -> None:
            super().__init__()
            self.collectives: list[tuple[str, int, int]] = []
            self._all_reduce = dist.all_reduce

        def __enter__(self) -> Any:
            def all_reduce(tensor: torch.Tensor, *args: Any, async_op: bool = False, **named: Any) -> Any:
                work = self._all_reduce(tensor, *args, async_op=async_op, **named)
                return Done(tensor) if async_op else work

            dist.all_reduce = all_reduce
            return super().__enter__()

        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            dist.all_reduce = self._all_reduce

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(issubclass(kind, DTensor) for kind in types):
                return NotImplemented  # what it does inside is seen
            name = func._schema.name.partition("::")[2]
            if func.namespace in ("c10d", "_c10d_functional") and name not in SILENT:
                whole = args[1] if name == "_reduce_scatter_base_" else args[0]  # gathered, reduced or sent
                size = sum(each.nbytes for each in tree_iter(whole) if isinstance(each, torch.Tensor))
                self.collectives.append((KINDS[name], size, self._ranks(args)))
            return func(*args, **(kwargs or {}))

        def _ranks(self, args: Any) -> int:
            for each in args:
                if isinstance(each, torch.ScriptObject):
                    try:
                        return int(dist.ProcessGroup.unbox(each).size())
                    except RuntimeError:
                        continue  # the operation, not the group
            return int(dist.distributed_c10d._get_group_size_by_name(args[-1]))

    return Recorder()
