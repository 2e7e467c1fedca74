"""Shards: every rank keeps its rows of each parameter, its gradient and its optimizer state (torch's FSDP2).

A block's weights are gathered for its forward and again for its backward, or kept until then; gradients are summed and
cut in the same exchange. Between the micro-batches of an update gradients stay whole on each rank, since they are
exchanged once; with ``exchange="micro_batch"`` they are summed and cut after each, and only the parts are kept. With
``cpu_offload`` these parts lie in host memory, and are copied to the device as they are gathered.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from unisono.dist import find_world
from unisono.errors import ConfigError, ModelError
from unisono.strategy.contract import StepAlone, norm_of, square_sum
from unisono.strategy.in_backward import StepsInBackward


class Fsdp2:
    """One group of parameters a transformer block, one for the rest (embeddings, last norm, head).

    Where products are computed in half precision, a block's linear layers are a group of their own.
    ``shard_ranks`` neighbours share one copy of the model (all ranks, where it is None): weights are gathered among
    them, gradients summed and cut among them, and then summed over the copies (hybrid sharding).

    The model may come without memory (meta device): weights are read after sharding, by whoever knows the files.
    Ranks must use the same parameters. ``unused="zero"`` lets them differ, on a torch that can (2.13 can, 2.8 cannot).
    """

    name = "fsdp2"
    forward_is_collective = True

    def __init__(
        self,
        *,
        unused: str,
        exchange: str = "update",
        compute: torch.dtype = torch.float32,
        shard_ranks: int | None = None,
        cpu_offload: bool = False,
        reshard_after_forward: bool = True,
    ) -> None:
        self._unused = unused
        self._exchanges_always = exchange == "micro_batch"
        self._compute = compute
        self._shard_ranks = shard_ranks
        self._offloads = cpu_offload
        self._reshards = reshard_after_forward
        self._in_backward: StepsInBackward | None = None
        self._root: FSDPModule | None = None
        self._parts: dist.ProcessGroup | None = None  # the ranks that share one copy of the model
        self._num_groups = 0

    def shard(self, model: torch.nn.Module) -> torch.nn.Module:
        """Collective. Replace parameters by their shards, in place; nothing is sent, so all ranks must hold the same.

        Its method ``verify`` runs blocks and head like a forward does, and is wrapped like one.
        """
        mesh = self._mesh()
        self._parts = mesh.get_group(mesh.ndim - 1)
        where: dict[str, Any] = {"mesh": mesh}
        if self._offloads:
            where["offload_policy"] = CPUOffloadPolicy(pin_memory=find_world().device.type == "cuda")
        cut = where | {"reshard_after_forward": self._reshards}
        blocks = [_shard_block(block, self._compute, cut) for block in find_blocks(model)]
        self._num_groups = 1 + sum(map(len, blocks))
        self._root = fully_shard(model, **where, reshard_after_forward=True)
        _gather_ahead(blocks, self._root)
        groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for group in groups:
            group.set_gradient_divide_factor(1.0)  # the sum, where torch's own factor would make a mean
            group.set_force_sum_reduction_for_comms(True)  # by a plain sum, which gloo has too
        if self._unused == "zero":
            _sum_zeros_for_unused(self._root)
        register_fsdp_forward_method(model, "verify")
        refuse_whole(model)
        return model

    def home(self, device: torch.device) -> torch.device:
        """Keep parts in host memory, if asked."""
        return torch.device("cpu") if self._offloads else device

    def zero(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the gradients' memory back."""
        optimizer.zero_grad(set_to_none=True)

    def microbatch(self, last: bool, *, is_tried: bool = False) -> AbstractContextManager[object]:
        """Exchange in the last micro-batch only, or in each; keep the root's weights for the backward that follows."""
        root = self._sharded()
        root.set_reshard_after_forward(False, recurse=False)
        exchanges = last or self._exchanges_always
        root.set_requires_gradient_sync(exchanges)
        root.set_is_last_backward(exchanges)
        if self._in_backward is not None:
            self._in_backward.begin(last, is_tried)
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Collective. Add the gradients of ``loss``; weights are gathered on the way."""
        loss.backward()  # type: ignore[no-untyped-call]

    def exposed_seconds(self) -> float:
        """Exchanges lie between all blocks: they are not told apart."""
        return 0.0

    def clip(self, max_norm: float | None) -> float:
        """Collective. Clip by the global norm: what the parts of one copy of the model amount to together."""
        parameters = [p for p in self._sharded().parameters() if p.grad is not None]  # type: ignore[attr-defined]
        if self._in_backward is not None:
            squares = self._in_backward.square_sum()
        else:
            squares = square_sum([norm_of(p) for p in parameters])
        dist.all_reduce(squares, group=self._parts)
        norm = squares.sqrt().float()
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return float(norm)

    def bind(self, optimizer: torch.optim.Optimizer, step_alone: StepAlone | None = None) -> None:
        """Leave it as it is, or let it step within backward, as each part of a gradient has been summed."""
        if step_alone is not None:
            trained = [p for p in self._sharded().parameters() if p.requires_grad]  # type: ignore[attr-defined]
            self._in_backward = StepsInBackward(trained, step_alone)

    def keeps(self, parameter: torch.nn.Parameter) -> bool:
        """Keep a part of each."""
        return True

    def describe(self) -> dict[str, object]:
        """Say into how many groups and over how many ranks the parameters are cut."""
        world = find_world().size
        copies = {"copies": world // self._shard_ranks} if self._shard_ranks else {}
        offloaded = {"parts": "in host memory"} if self._offloads else {}
        return {"name": self.name, "ranks": world, **copies, "groups": self._num_groups, **offloaded}

    def _mesh(self) -> DeviceMesh:
        """Collective. Lay the ranks out: in one line, or a line for each copy of the model."""
        world, shared = find_world(), self._shard_ranks
        if shared is None or shared == world.size:
            return init_device_mesh(world.device.type, (world.size,))
        shape = (world.size // shared, shared)
        return init_device_mesh(world.device.type, shape, mesh_dim_names=("copies", "parts"))

    def _sharded(self) -> FSDPModule:
        assert self._root is not None, "shard comes first"
        return self._root


def _shard_block(block: torch.nn.Module, compute: torch.dtype, cut: dict[str, Any]) -> list[FSDPModule]:
    """Cut a block; returns a module of each of its groups, in the order in which backward comes to them.

    Where products are in half precision the linear layers are a group whose weights are gathered in that format:
    autocast would make the same copies after a gather twice as large, and keep them all until backward. Norms stay with
    the block, in fp32, and so does everything where weights are packed into bytes: what is trained beside them is
    small. Gradients are summed in fp32.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    linear = [each for each in block.modules() if isinstance(each, torch.nn.Linear)]
    products: list[FSDPModule] = []
    if compute != torch.float32 and linear and all(each.weight.is_floating_point() for each in linear):
        products = fully_shard(list[torch.nn.Module](linear), **cut, mp_policy=policy)[:1]
    return [fully_shard(block, **cut), *products]


def _gather_ahead(blocks: list[list[FSDPModule]], root: FSDPModule) -> None:
    """Let backward ask for all groups of a block when the last group of the one after it has been taken.

    torch itself asks for one group more: for a block's norms, so that its linear layers would be asked for when they
    are needed. Forward need not be told: its gathers wait for no work, so that the host issues them ahead of it.
    """
    askers = [*(groups[-1] for groups in blocks[1:]), root]
    for asker, groups in zip(askers, blocks, strict=True):
        asker.set_modules_to_backward_prefetch(groups)


def find_blocks(model: torch.nn.Module) -> torch.nn.ModuleList:
    """Return the transformer blocks: the list of modules that holds most parameters."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    if not lists:
        raise ModelError(
            f"{type(model).__name__} has no list of blocks to shard one by one", where="strategy.name", hint="use ddp"
        )
    return max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))


def refuse_whole(model: torch.nn.Module) -> None:
    """Every trained parameter must be a shard: one that is not would be trained by each rank on its own data."""
    whole = [name for name, p in model.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if whole:
        raise ModelError(f"{len(whole)} trained parameters are not sharded: {', '.join(whole[:5])}")


def _sum_zeros_for_unused(root: FSDPModule) -> None:
    if "set_reduce_scatter_unused_params" not in dir(root):
        raise ConfigError(
            f"strategy.unused_parameters is zero, which fsdp2 of torch {torch.__version__} cannot do",
            where="strategy.unused_parameters",
            hint="use a newer torch (2.13 can), or strategy.name=ddp",
        )
    root.set_reduce_scatter_unused_params(True)
