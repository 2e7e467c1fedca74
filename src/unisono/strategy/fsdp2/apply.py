"""Shards: every rank keeps its rows of each parameter, its gradient and its optimizer state (torch's FSDP2).

A block's weights are gathered for its forward and again for its backward; gradients are summed and cut in the same
exchange. Between the micro-batches of an update gradients stay whole on each rank, since they are exchanged once; with
``exchange="micro_batch"`` they are summed and cut after each, and only the parts are kept.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from unisono.dist import find_world
from unisono.errors import ConfigError, ModelError


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
    ) -> None:
        self._unused = unused
        self._exchanges_always = exchange == "micro_batch"
        self._compute = compute
        self._shard_ranks = shard_ranks
        self._root: FSDPModule | None = None
        self._num_groups = 0

    def shard(self, model: torch.nn.Module) -> torch.nn.Module:
        """Collective. Replace parameters by their shards, in place; nothing is sent, so all ranks must hold the same.

        Its method ``verify`` runs blocks and head like a forward does, and is wrapped like one.
        """
        mesh = self._mesh()
        blocks, is_half = find_blocks(model), self._compute != torch.float32
        for block in blocks:
            if is_half:
                _shard_products(block, mesh, self._compute)
            fully_shard(block, mesh=mesh)
        self._root = fully_shard(model, mesh=mesh, reshard_after_forward=True)
        groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for group in groups:
            group.set_gradient_divide_factor(1.0)  # the sum, where torch's own factor would make a mean
            group.set_force_sum_reduction_for_comms(True)  # by a plain sum, which gloo has too
        self._num_groups = len(blocks) * (1 + is_half) + 1
        if self._unused == "zero":
            _sum_zeros_for_unused(self._root)
        register_fsdp_forward_method(model, "verify")
        refuse_whole(model)
        return model

    def zero(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the gradients' memory back."""
        optimizer.zero_grad(set_to_none=True)

    def microbatch(self, last: bool) -> AbstractContextManager[object]:
        """Exchange in the last micro-batch only, or in each; keep the root's weights for the backward that follows."""
        root = self._sharded()
        root.set_reshard_after_forward(False, recurse=False)
        exchanges = last or self._exchanges_always
        root.set_requires_gradient_sync(exchanges)
        root.set_is_last_backward(exchanges)
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """Collective. Add the gradients of ``loss``; weights are gathered on the way."""
        loss.backward()  # type: ignore[no-untyped-call]

    def exposed_seconds(self) -> float:
        """Exchanges lie between all blocks: they are not told apart."""
        return 0.0

    def clip(self, max_norm: float | None) -> float:
        """Collective. Clip by the global norm: the norm over shards is a promise until ``full_tensor`` sums it up."""
        parameters = [p for p in self._sharded().parameters() if p.grad is not None]  # type: ignore[attr-defined]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return float(norm)

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave it as it is."""

    def keeps(self, parameter: torch.nn.Parameter) -> bool:
        """Keep a part of each."""
        return True

    def describe(self) -> dict[str, object]:
        """Say into how many groups and over how many ranks the parameters are cut."""
        world = find_world().size
        copies = {"copies": world // self._shard_ranks} if self._shard_ranks else {}
        return {"name": self.name, "ranks": world, **copies, "groups": self._num_groups}

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


def _shard_products(block: torch.nn.Module, mesh: DeviceMesh, compute: torch.dtype) -> None:
    """Make a group of the block's linear layers, whose weights are gathered in the format of their products.

    Autocast would make the same copies after a gather twice as large, and keep them all until backward. Norms stay with
    the block, in fp32; gradients are summed in fp32.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    linear: list[torch.nn.Module] = [each for each in block.modules() if isinstance(each, torch.nn.Linear)]
    if linear:
        fully_shard(linear, mesh=mesh, mp_policy=policy)


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
