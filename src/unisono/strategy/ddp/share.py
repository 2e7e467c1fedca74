"""Share the optimizer out (ZeRO-1, Rajbhandari et al. 2020): each rank keeps the state of its parameters alone.

Every rank has all gradients, takes the step for its own parameters and sends these to the others. An optimizer whose
step treats each parameter by itself gives the same bits so as on one rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def share_out(optimizer: torch.optim.Optimizer, keeper: dict[torch.nn.Parameter, int], rank: int) -> None:
    """Let ``optimizer`` step this rank's parameters only, and get the others' from the ranks that keep them.

    Its step becomes collective.
    """

    def forget_others(*_: Any) -> None:
        for parameter, owner in keeper.items():
            if owner != rank:
                parameter.grad = None

    def exchange(*_: Any) -> None:
        works = [dist.broadcast(parameter.detach(), owner, async_op=True) for parameter, owner in keeper.items()]
        for work in works:
            work.wait()

    optimizer.register_step_pre_hook(forget_others)
    optimizer.register_step_post_hook(exchange)
