"""The story of a run: prepare, build, resume, loop, finish.

``torchrun ... -m unisono.train run.yaml`` and ``python -m unisono.train run.yaml`` come straight here;
``unisono train`` comes through the launcher. All of them run these lines.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path

from unisono import dist
from unisono.build import Run, announce, build, prepare
from unisono.checkpoint.manifest import Manifest
from unisono.checkpoint.save import save_checkpoint
from unisono.config.check import check, check_output_dir, check_world
from unisono.config.load import Loaded, load
from unisono.data.loader import Loader, UpdateBatch
from unisono.errors import ConfigError, NonFiniteError
from unisono.evaluation import Validation
from unisono.metrics.display import Display
from unisono.metrics.record import Spans
from unisono.model.load import base_name
from unisono.model.save import full_state, save_model
from unisono.optim import rate
from unisono.precision import choose
from unisono.resume import collect, find_checkpoint, restore
from unisono.runfolder import RunFolder, checkpoints_of, lock, open_run_folder
from unisono.state import TrainState, seed_update
from unisono.step import UpdateResult, take_update
from unisono.worker import run_worker

SAVE_EVERY_SECONDS = 300.0


def main(loaded: Loaded) -> None:
    """Run the whole story on this rank."""
    config = loaded.config
    world = dist.find_world()
    check_world(config, world.size)
    compute, reason = choose(config.precision.compute, world.device, config.precision.weights)
    if world.is_first:
        check_output_dir(Path(config.run.output_dir))
        lock(config.run.output_dir)
    inputs = prepare(config)
    dist.join(world, config.launch.timeout_seconds)
    run = build(config, inputs, world, compute)
    say = print if world.is_first else _silent
    folder = find_checkpoint(config, checkpoints_of(config.run.output_dir), world, say)
    state = TrainState()
    if folder is not None:
        state = restore(
            folder,
            run.named,
            run.optimizer,
            run.settings,
            allow_changes=config.checkpoint.allow_changes,
            world=world,
        )
        run.precision.restore(state.precision)
        say(f"resumed {folder.name}: {state.update} of {run.total} updates are done")
    announce(run, f"{compute} ({reason})", say)
    files = open_run_folder(loaded, rank=world.rank, world=world.size, update=state.update)
    loop(run, state, files)
    finish(run, files)
    del run
    dist.leave()


def loop(run: Run, state: TrainState, files: RunFolder) -> None:
    """Train the updates that are left; validate and save where they are due, and always at the end."""
    config, world = run.config, run.world
    build_batch = run.updates_from(state.position)
    loader = Loader(build_batch, first=state.update + 1, last=run.total, prefetch=config.data.prefetch)
    display = Display(first=state.update + 1, total=run.total, every=config.log.every, speaks=world.is_first)
    validation = Validation(run, files, display)
    spans, saved_at = Spans(), time.monotonic()
    batches = iter(loader)
    while state.update < run.total:
        with spans.span("data"):
            batch = next(batches)
        seed_update(config.run.seed, batch.number, world.rank)
        with spans.span("step"):
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
                wants_save=time.monotonic() - saved_at > SAVE_EVERY_SECONDS,
            )
        state.update, state.position = batch.number, batch.position
        count_bad(run, state, batch, result, display)
        record(run, files, display, spans, batch, result)
        last = state.update == run.total
        loss = None
        if is_due(config.validation.every, state.update) or last:
            loss = validation.measure(state, spans)
            note(files, "validation", spans, state)
        every = config.checkpoint.every
        if last or (result.save_wanted if every == "auto" else is_due(every, state.update)):
            with spans.span("checkpoint"):
                save(run, state, batch.epoch, loss)
            note(files, "checkpoint", spans, state)
            saved_at = time.monotonic()
    summarise(run, files, display, spans, state.update)
    display.close()


def count_bad(run: Run, state: TrainState, batch: UpdateBatch, result: UpdateResult, display: Display) -> None:
    """Count updates whose numbers are gone; stop, on all ranks alike, when the run file says so."""
    if result.is_sound:
        state.num_bad_in_a_row = 0
        return
    state.num_bad_in_a_row += 1
    blame = "; ".join(f"rank {rank}, samples {batch.records_by_rank[rank]}" for rank in result.bad_ranks)
    what = f"update {batch.number}: loss {result.loss}, gradient norm {result.grad_norm}"
    what += f" ({blame})" if blame else " (the loss is finite on every rank; the gradients are not)"
    optim = run.config.optim
    if optim.on_nonfinite == "stop" or state.num_bad_in_a_row >= optim.max_nonfinite:
        raise NonFiniteError(
            f"{what}: {state.num_bad_in_a_row} in a row",
            where="optim.on_nonfinite",
            hint="look at these samples; lower optim.lr; or set optim.on_nonfinite=skip to leave single ones out",
        )
    display.say(f"{what}: left out on all ranks")


def record(
    run: Run, files: RunFolder, display: Display, spans: Spans, batch: UpdateBatch, result: UpdateResult
) -> None:
    """Write and show a finished update."""
    seconds, parts = spans.take_update()
    speed = batch.num_tokens / seconds
    lr = rate(run.config.optim, batch.number, run.total, run.peak)
    files.line(
        {
            "update": batch.number,
            "epoch": batch.epoch,
            "loss": result.loss,
            "num_targets": batch.num_targets,
            "num_tokens": batch.num_tokens,
            "lr": lr,
            "grad_norm": result.grad_norm,
            "stepped": result.stepped,
            "seconds": seconds,
            "tokens_per_second": speed,
            "seconds_by_cause": parts,
        }
    )
    files.ids(batch.number, batch.records)
    files.left_out(batch.number, batch.left_out)
    files.events.write(
        {
            "update": batch.number,
            "seconds": seconds,
            "spans": parts,
            "micro_batches": len(batch.micro_batches),
        }
    )
    display.update(batch.number, loss=result.loss, tokens_per_second=speed, rate=lr, grad_norm=result.grad_norm)


def note(files: RunFolder, what: str, spans: Spans, state: TrainState) -> None:
    """Write how long something besides the updates took; the spans begin anew."""
    seconds, parts = spans.take()
    files.events.write({"kind": what, "update": state.update, "seconds": seconds, "spans": parts})


def summarise(run: Run, files: RunFolder, display: Display, spans: Spans, update: int) -> None:
    """Collective. Write where the time of this session's updates went; say how much of it was waiting for data.

    The rank that waited most counts, since the others wait for it.
    """
    session = spans.session
    if session.num_updates == 0:
        return
    share = max(theirs for (theirs,) in dist.gather([session.data_wait_share]))
    line = {"kind": "summary", "update": update, **asdict(session)}
    files.line(line | {"data_wait_share": share})
    files.events.write(line | {"data_wait_share": session.data_wait_share})
    for sentence in session.sentences(share, run.config.data.prefetch):
        display.say(sentence)


def save(run: Run, state: TrainState, epoch: int, validation_loss: float | None) -> None:
    """Collective. Write a checkpoint of the finished update."""
    state.precision = run.precision.state()
    manifest = Manifest(
        update=state.update,
        epoch=epoch,
        world=run.world.size,
        state=state.as_dict(),
        settings=run.settings,
        validation_loss=validation_loss,
    )
    save_checkpoint(
        checkpoints_of(run.config.run.output_dir),
        collect(run.named, run.optimizer),
        manifest,
        world=run.world,
        keep=run.config.checkpoint.keep,
    )


def finish(run: Run, files: RunFolder) -> None:
    """Collective. Hand over the final model and close the run folder."""
    state = full_state(run.saved, keeps=run.world.is_first)
    if run.world.is_first:
        save_model(
            run.saved,
            run.inputs.folder,
            files.model,
            base=base_name(run.config.model.path, run.inputs.folder),
            state=state,
        )
        print(f"the model is in {files.model}", flush=True)
    files.close()
    dist.wait_for_all()


def is_due(every: int | None, update: int) -> bool:
    """Tell whether something done every ``every`` updates is due after ``update``."""
    return every is not None and update % every == 0


def _silent(_: str) -> None:
    """Say nothing: the voice of ranks other than the first."""


def start(arguments: list[str]) -> None:
    """Read the run file and the overrides of the command line, check them, and run."""
    if not arguments:
        raise ConfigError("no run file is named", hint="python -m unisono.train RUN.yaml [section.key=value ...]")
    loaded = load(Path(arguments[0]), arguments[1:])
    check(loaded.config)
    main(loaded)


if __name__ == "__main__":
    run_worker(lambda: start(sys.argv[1:]))
