"""How ranks share the work: one folder a strategy, one contract, one contract test."""

from __future__ import annotations

from unisono.config.schema import StrategySection
from unisono.strategy.contract import Strategy


def choose(section: StrategySection, world: int) -> Strategy:
    """Return the strategy of the run; auto = single for one rank, else ddp."""
    name = ("single" if world == 1 else "ddp") if section.name == "auto" else section.name
    if name == "single":
        from unisono.strategy.single.apply import Single

        return Single()
    from unisono.strategy.ddp.apply import Ddp

    return Ddp(bucket_mib=section.bucket_mib, unused=section.unused_parameters)


__all__ = ["Strategy", "choose"]
