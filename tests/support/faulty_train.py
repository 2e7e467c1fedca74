"""`unisono.train` with one fault planted: FAULT is phase@rank (or @all), run as the ranks' module by the launcher."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from unisono import dist, evaluation, saving, step, train
from unisono.data.loader import Batches
from unisono.loss import TrainingModel
from unisono.runfolder import RunFolder
from unisono.worker import run_worker

phase, _, rank = os.environ["FAULT"].partition("@")


def fails(*_: Any, **__: Any) -> Any:
    """Take the place of something on the chosen rank; the moment is noted."""
    Path(os.environ["FAULT_TIME"]).write_text(str(time.time()))
    raise RuntimeError(f"planted in {phase}")


def after_update_two(method: Any) -> Any:
    """Fail in the third call, when a checkpoint of update 2 is there to be kept."""
    count = iter(range(1, 10**6))

    def counting(*args: Any, **kwargs: Any) -> Any:
        return fails() if next(count) > 2 else method(*args, **kwargs)

    return counting


def in_third_update(self: TrainingModel, *args: Any, **kwargs: Any) -> Any:
    """Fail in forward of the third update."""
    return fails() if in_work[-1] > 2 else forward(self, *args, **kwargs)


def nan_in_backward(self: TrainingModel, *args: Any, **kwargs: Any) -> Any:
    """Give a loss that is not a number from the first update on."""
    return forward(self, *args, **kwargs) * float("nan")


class ActsInBackward(torch.autograd.Function):
    """The identity; does something when its gradient is asked for."""

    @staticmethod
    def forward(ctx: Any, loss: Any, act: Any) -> Any:
        """Pass the loss through."""
        ctx.act = act
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Act; if that comes back, pass the gradient through."""
        ctx.act()
        return grad, None


def backward_fails(self: TrainingModel, *args: Any, **kwargs: Any) -> Any:
    """Fail in the middle of backward of the third update."""
    loss = forward(self, *args, **kwargs)
    return ActsInBackward.apply(loss, fails) if in_work[-1] > 2 else loss


def delayed(method: Any, seconds: float, spared: int = 0) -> Any:
    """Do it, after a while; the moment of the first delay is noted. The first ``spared`` calls are not delayed."""
    count = iter(range(10**6))

    def late(*args: Any, **kwargs: Any) -> Any:
        number = next(count)
        if number >= spared:
            if number == spared:
                Path(os.environ["FAULT_TIME"]).write_text(str(time.time()))
            time.sleep(seconds)
        return method(*args, **kwargs)

    return late


def note_update(seed: int, number: int, rank: int) -> None:
    """Know which update is in work."""
    in_work.append(number)
    seed_update(seed, number, rank)


def killed_once(self: TrainingModel, *args: Any, **kwargs: Any) -> Any:
    """Die in the middle of update 4, if it has not happened yet."""
    moment = Path(os.environ["FAULT_TIME"])
    if in_work[-1] == 4 and not moment.exists():
        moment.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    return forward(self, *args, **kwargs)


def poisoned(self: TrainingModel, *args: Any, **kwargs: Any) -> Any:
    """Fail in update 4, always."""
    return fails() if in_work[-1] == 4 else forward(self, *args, **kwargs)


def short_of_memory(self: TrainingModel, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Have no room for more than 150 tokens."""
    if input_ids.numel() > 150:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
    return forward(self, input_ids, *args, **kwargs)


def nan_in_two(self: TrainingModel, *args: Any, **kwargs: Any) -> Any:
    """Give a loss that is not a number in updates 4 and 5."""
    return forward(self, *args, **kwargs) * (float("nan") if in_work[-1] in (4, 5) else 1.0)


def hang(*_: Any, **__: Any) -> Any:
    """Never come back; the moment is noted."""
    Path(os.environ["FAULT_TIME"]).write_text(str(time.time()))
    time.sleep(10_000)


def hang_in_four(method: Any) -> Any:
    """Hang in update 4."""

    def hanging(*args: Any, **kwargs: Any) -> Any:
        return hang() if in_work[-1] == 4 else method(*args, **kwargs)

    return hanging


def hang_at_four(self: Batches, number: int, *args: Any) -> Any:
    """Hang in building the batch of update 4."""
    return hang() if number == 4 else build_batch(self, number, *args)


def hang_once(self: TrainingModel, *args: Any, **kwargs: Any) -> Any:
    """Hang in update 4, if it has not happened yet."""
    if in_work[-1] == 4 and not Path(os.environ["FAULT_TIME"]).exists():
        hang()
    return forward(self, *args, **kwargs)


build_batch = Batches.build
in_work = [0]
seed_update, train.seed_update = train.seed_update, note_update
forward = TrainingModel.forward

if rank in ("all", os.environ["RANK"]):
    if phase == "group":
        dist.join = train.dist.join = fails
    elif phase == "fetch":
        Batches.build = after_update_two(Batches.build)
    elif phase == "forward":
        TrainingModel.forward = in_third_update
    elif phase == "backward":
        TrainingModel.forward = backward_fails
    elif phase == "nan":
        TrainingModel.forward = nan_in_backward
    elif phase == "validation":
        evaluation.evaluate = fails
    elif phase == "save":
        saving.save_checkpoint = after_update_two(saving.save_checkpoint)
    elif phase == "slow":
        TrainingModel.forward = delayed(forward, 0.2)
    elif phase == "very_slow":
        TrainingModel.forward = delayed(forward, 10.0, spared=1)
    elif phase == "slow_validation":
        evaluation.evaluate = delayed(evaluation.evaluate, 1.0)
    elif phase == "slow_save":
        saving.save_checkpoint = delayed(saving.save_checkpoint, 2.0)
    elif phase == "slow_load":
        train.build = delayed(train.build, 2.0)
    elif phase == "killed_once":
        TrainingModel.forward = killed_once
    elif phase == "poison":
        TrainingModel.forward = poisoned
    elif phase == "no_room":
        TrainingModel.forward = short_of_memory
    elif phase == "nan_in_two":
        TrainingModel.forward = nan_in_two
    elif phase == "hang_collate":
        Batches.build = hang_at_four
    elif phase == "hang_forward":
        TrainingModel.forward = hang_in_four(forward)
    elif phase == "hang_backward":
        TrainingModel.forward = lambda *args, **kwargs: ActsInBackward.apply(
            forward(*args, **kwargs), hang_in_four(lambda: None)
        )
    elif phase == "hang_optimizer":
        step.set_rate = hang_in_four(step.set_rate)
    elif phase == "hang_validation":
        evaluation.evaluate = hang_in_four(evaluation.evaluate)
    elif phase == "hang_once":
        TrainingModel.forward = hang_once
    elif phase == "untried":
        train.try_fullest = lambda *_: None
    elif phase == "log":
        RunFolder.line = after_update_two(RunFolder.line)
        RunFolder.ids = after_update_two(RunFolder.ids)

if __name__ == "__main__":
    run_worker(lambda: train.start(sys.argv[1:]))
