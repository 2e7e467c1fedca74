"""``unisono rehearse``: all that a night's run will do, in its first minutes, in a folder that is taken away again.

At the real number of ranks: the fullest micro-batch, some updates, a save, a kill, the way back, a validation with its
answers and the final model; one update on one rank beside the same on all; room on the disk; and how long it will take.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from unisono.config.load import Loaded
from unisono.config.schema import RunConfig
from unisono.drill.faults import Fault
from unisono.drill.scratch import Interrupted, Outcome, Scratch
from unisono.goodput import counted
from unisono.launch.ranks import Machine, decide_ranks, look_at_machine
from unisono.launch.restarts import OUT_OF_MEMORY
from unisono.stopping import AGAIN

SAVED_AT, KILLED_AT, NUM_UPDATES = 2, 4, 6
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2, "auto": 2e-2}  # of loss and norm of one update, relative


@dataclass
class Finding:
    """What a part of the rehearsal found; not ``ok``: it would spoil the run."""

    ok: bool
    words: str


def rehearse(loaded: Loaded, given: Sequence[str], say: Callable[[str], None]) -> int:
    """Rehearse the run; returns 0 if it is ready, 1 if not, AGAIN if the person stopped it."""
    config, machine = loaded.config, look_at_machine()
    ranks = decide_ranks(config, machine)
    on = f"on {counted(ranks, 'rank')}"
    say(f"rehearsal: {NUM_UPDATES} updates {on}, with a kill in update {KILLED_AT}; nothing of it is kept")
    settings: dict[str, object] = {"launch.max_restarts": 1, "launch.ranks": ranks}
    try:
        with Scratch.beside(loaded, given) as scratch:
            whole = {**settings, "length.updates": NUM_UPDATES, "checkpoint.every": SAVED_AT}
            together = scratch.run("together", whole, [Fault("kill", ranks - 1, KILLED_AT, "backward")])
            if together.code != 0:
                say(f"\nnot ready: the rehearsal ended with exit code {together.code}: see above")
                return 1
            findings = [_way_back(together), _disk(config, together, scratch.folder)]
            if ranks > 1:
                say("\nrehearsal: the first update once more, on one rank")
                one = {**settings, "length.updates": 1, "launch.ranks": 1, "strategy.name": "auto"}
                findings.append(_comparison(config, together, scratch.run("alone", one), ranks))
            say("")
            for finding in findings:
                say(f"{'ok' if finding.ok else 'NOT OK':8}{finding.words}")
            ready = all(finding.ok for finding in findings)
            say(f"{'ready' if ready else 'not ready'}: {_how_long(config, together)}, {_peak(together, machine)}")
            return 0 if ready else 1
    except Interrupted:
        say("rehearsal: stopped")
        return AGAIN


def _way_back(outcome: Outcome) -> Finding:
    faults = outcome.account.faults
    if len(faults) != 1 or faults[0].recovery_seconds is None:
        return Finding(False, f"a rank was killed in update {KILLED_AT}, and the run met {len(faults)} faults")
    fault = faults[0]
    return Finding(
        True,
        f"killed in update {KILLED_AT}: {fault.recovery_seconds:.0f} s until there was a new update, "
        f"{counted(fault.updates_redone or 0, 'update')} done again",
    )


def _disk(config: RunConfig, outcome: Outcome, scratch: Path) -> Finding:
    newest = max((outcome.folder / "checkpoints").glob("update-*"))
    checkpoint, model = _size(newest), _size(outcome.folder / "model")
    needed = checkpoint * (config.checkpoint.keep + 2) + model  # the best one, and the one that is being written
    free = shutil.disk_usage(scratch).free + _size(scratch)
    words = (
        f"disk: {config.checkpoint.keep} checkpoints of {checkpoint / 1e6:,.1f} MB, the best, one being written, and "
    )
    words += f"the model need {needed / 1e6:,.1f} MB; {free / 1e6:,.1f} MB are free"
    return Finding(free >= needed, words)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _comparison(config: RunConfig, together: Outcome, alone: Outcome, ranks: int) -> Finding:
    if alone.code == OUT_OF_MEMORY:
        return Finding(True, f"update 1 of {ranks} ranks was not compared: one rank alone has too little memory for it")
    if alone.code != 0:
        return Finding(False, f"one rank alone ended with exit code {alone.code}")
    mine, theirs = together.updates[1], alone.updates[1]
    if not (mine["stepped"] and theirs["stepped"]):
        return Finding(False, "the numbers of update 1 are not finite")
    apart = max(abs(mine[key] - theirs[key]) / max(abs(theirs[key]), 1e-9) for key in ("loss", "grad_norm"))
    allowed = TOLERANCE[config.precision.compute]
    words = f"update 1 on {ranks} ranks and on one: loss {mine['loss']:.6f} and {theirs['loss']:.6f}, "
    words += (
        f"gradient norm {mine['grad_norm']:.5f} and {theirs['grad_norm']:.5f} (apart {apart:.1g}, at most {allowed:g})"
    )
    return Finding(apart <= allowed and together.ids()[1] == alone.ids()[1], words)


def _how_long(config: RunConfig, outcome: Outcome) -> str:
    total, usual = _num_updates(config), _update_seconds(outcome)
    lost = outcome.account.lost_seconds
    num_validations = 1 + (total // config.validation.every if config.validation.every else 0)
    start = lost["start"] + lost["finish"]
    seconds = start + total * usual + num_validations * lost["validation"]
    return f"about {_duration(seconds)} for {total:,} updates of {usual:.2f} s"


def _update_seconds(outcome: Outcome) -> float:
    """The first update of each start is slower: it warms up."""
    return float(median(outcome.updates[n]["seconds"] for n in (SAVED_AT, KILLED_AT, KILLED_AT + 1, NUM_UPDATES)))


def _num_updates(config: RunConfig) -> int:
    if config.length.updates is not None:
        return config.length.updates
    from unisono.build import make_order, prepare

    order = make_order(config, prepare(config, lambda _: None).data)
    return order.num_updates(config.length.epochs or 1)


def _peak(outcome: Outcome, machine: Machine) -> str:
    peak = outcome.summary["peak_memory_bytes"] / 2**30
    if machine.gpus:
        import torch

        return f"peak {peak:.1f} of {torch.cuda.get_device_properties(0).total_memory / 2**30:.1f} GiB a GPU"
    import psutil

    return f"peak {peak:.1f} GiB a process, {psutil.virtual_memory().total / 2**30:.1f} GiB in this machine"


def _duration(seconds: float) -> str:
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole} s" if minutes else f"{whole} s"
