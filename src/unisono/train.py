"""The story of a run: prepare, build, resume, loop, finish.

``torchrun ... -m unisono.train run.yaml`` and ``python -m unisono.train run.yaml`` come straight here;
``unisono train`` comes through the launcher. All of them run these lines.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from unisono import dist
from unisono.build import Run, announce, build, prepare
from unisono.config.check import check, check_length, check_output_dir, check_world
from unisono.config.load import Loaded, load
from unisono.data.loader import Loader, UpdateBatch
from unisono.errors import ConfigError, NonFiniteError
from unisono.evaluation import Validation
from unisono.journal import Journal
from unisono.memory import memory_named, try_fullest
from unisono.model.load import base_name
from unisono.model.save import hand_over
from unisono.optim import rate
from unisono.outcome import UpdateResult, Word, leave_out
from unisono.precision import choose
from unisono.pulse import LEFT, Pulse, open_pulse
from unisono.resume import find_checkpoint, restore
from unisono.runfolder import RunFolder, checkpoints_of, lock, open_run_folder
from unisono.saving import Saver
from unisono.settle import settle
from unisono.state import TrainState, seed_update
from unisono.step import take_update
from unisono.stopping import AGAIN, StopRequest, interrupt, notice
from unisono.worker import run_worker


def main(loaded: Loaded, pulse: Pulse) -> int:
    """Run the whole story on this rank; returns the exit code: 0, or AGAIN if it was asked to stop before the end."""
    config, stop = loaded.config, StopRequest(loaded.config.run.output_dir)
    world = dist.find_world()
    check_world(config, world.size)
    compute, reason = choose(config.precision.compute, world.device, config.precision.weights)
    if world.is_first:
        check_output_dir(Path(config.run.output_dir))
        lock(config.run.output_dir)
    pulse.at("prepare")
    with notice().answering(interrupt):
        inputs = prepare(config)
    pulse.at("group")
    dist.join(world, config.launch.timeout_seconds)
    pulse.at("load")
    say = print if world.is_first else _silent
    settled = settle(loaded, inputs, world, compute, say)
    config = settled.applied(config)
    run = build(config, inputs, world, compute, settled.overrides)
    check_length(config, run.total)
    pulse.at("resume")
    folder = find_checkpoint(config, checkpoints_of(config.run.output_dir), world, say)
    state = TrainState()
    if folder is not None:
        state = restore_run(run, folder)
        say(f"resumed {folder.name}: {state.update} of {run.total} updates are done")
    announce(run, f"{compute} ({reason})", say)
    files = open_run_folder(loaded, rank=world.rank, world=world.size, update=state.update, validated=state.validated)
    if not state.update:
        pulse.at("rehearsal")
        try_fullest(run, say)
    with memory_named(run, lambda: f"update {state.update + 1}"):
        is_whole = loop(run, state, files, pulse, stop)
    if is_whole:
        finish(run, files, pulse)
    else:
        stop.honour(state.update, say)
    files.close()
    del run
    dist.leave()
    pulse.at(LEFT)
    return 0 if is_whole else AGAIN


def loop(run: Run, state: TrainState, files: RunFolder, pulse: Pulse, stop: StopRequest) -> bool:
    """Train the updates that are left; validate and save where they are due, and always at the end.

    False if it was asked to stop: the newest update is saved then, and what was due after it is caught up by the run
    that goes on.
    """
    config, world = run.config, run.world
    journal = Journal(run, files, pulse, first=state.update + 1)
    validation, saver = Validation(run, files, journal.display), Saver(run, files)
    spans = journal.spans
    loader = Loader(
        run.updates_from(state.position),
        first=state.update + 1,
        last=run.total,
        prefetch=config.data.prefetch,
        listener=pulse.beside,
    )
    batches = iter(loader)
    stops = dist.any_rank(stop.is_asked()) or not validate(run, state, journal, validation, stop)
    while state.update < run.total and not stops:
        with spans.span("data"):
            batch = next(batches)
        saver.check()
        pulse.begin(batch.number, batch.records)
        seed_update(config.run.seed, batch.number, world.rank)

        def word(exposed_seconds: float) -> Word:
            compute, data = spans.so_far("forward", "backward", "other") - exposed_seconds, spans.so_far("data")
            return Word(saver.is_wanted(), stop.is_asked(), compute, data, exposed_seconds)

        if batch.number in config.optim.skip_updates:
            result = leave_out(word)
        else:
            result = take_update(
                run.model,
                batch.micro_batches,
                num_targets=batch.num_targets,
                strategy=run.strategy,
                optimizer=run.optimizer,
                precision=run.precision,
                world=world,
                rate=rate(config.optim, batch.number, run.total, run.peak),
                max_grad_norm=config.optim.max_grad_norm,
                word=word,
                enter=spans.enter,
            )
        spans.enter("other")
        state.update, state.epoch, state.position = batch.number, batch.epoch, batch.position
        count_bad(run, state, batch, result, saver, journal)
        journal.update(batch, result)
        stops = result.stop_wanted or not validate(run, state, journal, validation, stop)
        last = state.update == run.total
        if last or stops or saver.is_due(state.update, result.save_wanted):
            with spans.span("checkpoint"):
                saver.save(state, wait=last or stops)
            journal.note("checkpoint", state)
    journal.close(state.update, is_whole=not stops)
    return not stops


def validate(run: Run, state: TrainState, journal: Journal, validation: Validation, stop: StopRequest) -> bool:
    """Collective. Validate if it is due and not done yet; False if a request to stop cut it short."""
    update = state.update
    if update in (0, state.validated) or not (is_due(run.config.validation.every, update) or update == run.total):
        return True
    is_whole = validation.measure(state, journal.spans, lambda: dist.any_rank(stop.is_asked()))
    journal.note("validation", state)
    return is_whole


def count_bad(
    run: Run, state: TrainState, batch: UpdateBatch, result: UpdateResult, saver: Saver, journal: Journal
) -> None:
    """Count updates whose numbers are gone; all ranks leave them out, go back or stop, as the run file says."""
    if result.is_sound:
        state.num_bad_in_a_row = 0
        return
    state.num_bad_in_a_row += 1
    blame = "; ".join(f"rank {rank}, samples {batch.records_by_rank[rank]}" for rank in result.bad_ranks)
    what = f"update {batch.number}: loss {result.loss}, gradient norm {result.grad_norm}"
    what += f" ({blame})" if blame else " (the loss is finite on every rank; the gradients are not)"
    optim, num_bad = run.config.optim, state.num_bad_in_a_row
    folder = None
    if optim.on_nonfinite == "rewind" and num_bad == optim.max_nonfinite:
        saver.wait()
        checkpoints = checkpoints_of(run.config.run.output_dir)
        say = journal.display.say
        folder = find_checkpoint(run.config, checkpoints, run.world, say, last=batch.number - num_bad)
    if folder is not None:
        restore_run(run, folder)
        what += f"; weights and optimizer are those of {folder.name} again, the updates since are left out"
    elif optim.on_nonfinite == "stop" or num_bad >= optim.max_nonfinite:
        raise NonFiniteError(
            f"{what}: {num_bad} in a row",
            where="optim.on_nonfinite",
            hint="look at these samples; lower optim.lr; or set optim.on_nonfinite=skip to leave single ones out",
        )
    journal.display.say(f"{what}: left out on all ranks")


def restore_run(run: Run, folder: Path) -> TrainState:
    """Collective. Put a verified checkpoint into the run."""
    state = restore(
        folder,
        run.named,
        run.kept,
        run.optimizer,
        run.settings,
        allow_changes=run.config.checkpoint.allow_changes,
        world=run.world,
    )
    run.precision.restore(state.precision)
    return state


def finish(run: Run, files: RunFolder, pulse: Pulse) -> None:
    """Collective. Hand over the final model."""
    pulse.at("export")
    hand_over(
        run.saved,
        run.inputs.folder,
        files.model,
        base=base_name(run.config.model.path, run.inputs.folder),
        writes=run.world.is_first,
    )
    if run.world.is_first:
        print(f"the model is in {files.model}", flush=True)
    dist.wait_for_all()


def is_due(every: int | None, update: int) -> bool:
    """Tell whether something done every ``every`` updates is due after ``update``."""
    return every is not None and update % every == 0


def _silent(_: str) -> None:
    """Say nothing: the voice of ranks other than the first."""


def start(arguments: list[str], make_pulse: Callable[[], Pulse] = open_pulse) -> int:
    """Read the run file and the overrides of the command line, check them, and run."""
    if not arguments:
        raise ConfigError("no run file is named", hint="python -m unisono.train RUN.yaml [section.key=value ...]")
    loaded = load(Path(arguments[0]), arguments[1:])
    check(loaded.config)
    return main(loaded, make_pulse())


if __name__ == "__main__":
    run_worker(lambda: start(sys.argv[1:]))
