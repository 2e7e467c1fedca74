"""When a run saves, and what: the policy between the loop and the checkpoints."""

from __future__ import annotations

import time
from functools import partial

import torch

from unisono.build import Run
from unisono.checkpoint.background import Background
from unisono.checkpoint.interval import seconds_between_saves
from unisono.checkpoint.manifest import Manifest
from unisono.checkpoint.save import check_room, save_checkpoint, share_of
from unisono.dist import any_rank, second_group
from unisono.errors import OutputError
from unisono.optim import moment_bytes
from unisono.resume import OPTIMIZER, collect
from unisono.runfolder import RunFolder, checkpoints_of
from unisono.state import TrainState

FIRST_SECONDS = (
    15.0  # after which an automatic first save comes: it tells what a save costs, and faults may be frequent
)


class Saver:
    """Saves a run's checkpoints. Collective, all of it but ``is_wanted`` and ``check``."""

    def __init__(self, run: Run, files: RunFolder) -> None:
        self._run = run
        self._ran_seconds, self._num_faults = files.ledger.past() if files.ledger is not None else (0.0, 0)
        self._folder = checkpoints_of(run.config.run.output_dir)
        self._group = second_group(run.world)
        self._background = Background()
        self._saved_update = 0
        self._began = self._saved_at = time.monotonic()
        self._stall_seconds: float | None = None  # of the newest save
        self.check_room()

    def check_room(self) -> None:
        """Refuse to start where there is no room for one more checkpoint and the final model."""
        run, checkpoint = self._run, self._checkpoint_bytes()
        trained = sum(parameter.nbytes for _, parameter in run.named)
        handed_over = run.saved if run.config.model.lora is None else None
        model = sum(each.nbytes for each in handed_over.parameters()) if handed_over is not None else trained
        problem = ""
        if run.world.is_first:
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                check_room(self._folder, checkpoint + model, "a checkpoint with the final model")
            except OSError as error:
                problem = str(error.strerror)
        if any_rank(bool(problem)):
            raise OutputError(
                problem or "there is no room for a checkpoint: see rank 0",
                where=f"run.output_dir {self._folder.parent}",
                hint="make room, or choose another disk; checkpoint.keep says how many checkpoints are kept",
            )

    def _checkpoint_bytes(self) -> int:
        optim = self._run.config.optim
        return sum(parameter.nbytes + moment_bytes(optim, parameter) for _, parameter in self._run.named)

    def is_wanted(self) -> bool:
        """Tell whether this rank's clock says that it is time; rank 0's is what counts (``checkpoint.every: auto``).

        Not while the save before is being written: what that costs is known at its end.
        """
        now = time.monotonic()
        return not self._background.is_busy and now - self._saved_at > self._interval_seconds(now)

    def _interval_seconds(self, now: float) -> float:
        if self._stall_seconds is None:
            return FIRST_SECONDS
        cost = self._stall_seconds + self._background.seconds
        if not self._num_faults:
            return seconds_between_saves(cost)
        return seconds_between_saves(cost, (self._ran_seconds + now - self._began) / self._num_faults)

    def is_due(self, update: int, wanted: bool) -> bool:
        """Tell whether to save after ``update``; ``wanted`` is rank 0's clock, as all ranks heard it."""
        every = self._run.config.checkpoint.every
        return wanted if every == "auto" else update % every == 0

    def check(self) -> None:
        """Raise what went wrong with the save in the background, if it is known by now."""
        self._background.check()

    def wait(self) -> None:
        """Return when nothing is being saved."""
        self._background.wait()

    def save(self, state: TrainState, *, wait: bool) -> None:
        """Save the run as it is after its newest update; returns after the copy, or with ``wait`` when it is on disk.

        Saving what is saved already does nothing.
        """
        run, begin = self._run, time.monotonic()
        if self._saved_update != state.update:
            state.precision = run.precision.state()
            manifest = Manifest(
                update=state.update,
                epoch=state.epoch,
                world=run.world.size,
                state=state.as_dict(),
                settings=run.settings,
                validation_loss=state.validation_loss if state.validated == state.update else None,
            )
            self._write(collect(run.named, run.optimizer), manifest)
            self._saved_update = state.update
        if wait:
            self._background.wait()
        self._saved_at = time.monotonic()
        self._stall_seconds = self._saved_at - begin

    def _write(self, tensors: dict[str, torch.Tensor], manifest: Manifest) -> None:
        section, world = self._run.config.checkpoint, self._run.world
        is_shared_out = self._run.config.strategy.share_optimizer
        alone = {name for name in tensors if is_shared_out and name.startswith(OPTIMIZER)}
        share = share_of(tensors, alone=alone, rank=world.rank, world=world.size)
        write = partial(
            save_checkpoint,
            self._folder,
            manifest=manifest,
            world=world,
            keep=section.keep,
            needed_bytes=self._checkpoint_bytes(),
            group=self._group,
        )
        if section.mode == "wait":
            write(share)
        else:
            self._background.save(share, write)
