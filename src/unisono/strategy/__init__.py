"""How ranks share the work: one folder a strategy, one contract, one contract test."""

from __future__ import annotations

import torch

from unisono.config.schema import StrategySection
from unisono.errors import ConfigError
from unisono.strategy.contract import Strategy


def choose(section: StrategySection, world: int, compute: torch.dtype = torch.float32) -> Strategy:
    """Return the strategy of the run; auto = single for one rank, else ddp. ``compute``: the format of products."""
    name = ("single" if world == 1 else "ddp") if section.name == "auto" else section.name
    if world == 1 and name != "single":
        raise ConfigError(
            f"strategy.name is {name}, but there is one rank", where="strategy.name", hint="use strategy.name=auto"
        )
    if name == "fsdp2":
        from unisono.strategy.fsdp2.apply import Fsdp2

        return Fsdp2(
            unused=section.unused_parameters,
            exchange=section.exchange,
            compute=compute,
            shard_ranks=section.shard_ranks,
            cpu_offload=section.cpu_offload,
            reshard_after_forward=section.reshard_after_forward,
        )
    if name == "single":
        from unisono.strategy.single.apply import Single

        return Single()
    from unisono.strategy.ddp.apply import Ddp

    return Ddp(bucket_mib=section.bucket_mib, unused=section.unused_parameters, share_optimizer=section.share_optimizer)


__all__ = ["Strategy", "choose"]
