"""``unisono drill``: hit a short run of the person's own run file with faults, and compare it with one left alone.

What must come out: a run that goes on by itself, and is at its end the run that nothing happened to. On CPUs that is
checked bit by bit; GPU kernels may add in another order, so losses are compared there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from unisono.config.load import Loaded
from unisono.config.schema import RunConfig
from unisono.drill.faults import KINDS, Fault, parse
from unisono.drill.scratch import Interrupted, Outcome, Scratch, differences
from unisono.errors import ConfigError
from unisono.goodput import counted
from unisono.launch.failure import NUMBERS_GONE
from unisono.launch.ranks import decide_ranks, look_at_machine
from unisono.launch.restarts import OUT_OF_MEMORY, POISON, SAME_UPDATE
from unisono.stopping import AGAIN

STANDARD = (
    "kill@{last}:3:backward",
    "raise@0:4:forward",
    "torn@0:6:checkpoint",
    "hang@{last}:9:data",
    "stop@{last}:10:optimizer",
)
HARMLESS = ("slow", "stop", "nan", "oom")  # no update fails by them, or another rule counts it
SAVE_EVERY = 2  # updates
MORE_UPDATES = 2  # after the last fault
HANG_SECONDS = 20.0
SMALLER_BATCHES = 1e-4  # of a loss in fp32: an out-of-memory fault changes the micro-batches, and so the roundings
ROUGH = 2e-2  # in half precision, and on GPUs


def drill(loaded: Loaded, given: Sequence[str], inject: Sequence[str], say: Callable[[str], None]) -> int:
    """Run the drill; returns 0 if the run behaved as it must, 1 if not, AGAIN if the person stopped it."""
    config = loaded.config
    machine = look_at_machine()
    ranks = decide_ranks(config, machine)
    faults = [parse(text, ranks=ranks) for text in inject or [text.format(last=ranks - 1) for text in STANDARD]]
    settings = _settings(config, faults, ranks)
    where = f"{settings['length.updates']} updates on {counted(ranks, 'rank')}"
    say(f"drill: {counted(len(faults), 'fault')} in {where}, in a folder that is taken away again")
    for fault in faults:
        say(f"  {fault}: {KINDS[fault.kind]}")
    left_out = _left_out(config, faults)
    try:
        with Scratch.beside(loaded, given) as scratch:
            say("drill: first the run that nothing happens to")
            whole = scratch.run("whole", {**settings, "optim.skip_updates": left_out})
            if whole.code != 0:
                say(f"drill: the run fails without any fault (exit code {whole.code}): see above")
                return 1
            say("drill: now the same, with the faults")
            hit = scratch.run("hit", settings, faults)
            tolerance = _tolerance(config, faults, on_gpus=bool(machine.gpus))
            return _verdict(config, hit, whole, faults, left_out, tolerance, say)
    except Interrupted:
        say("drill: stopped")
        return AGAIN


def _settings(config: RunConfig, faults: Sequence[Fault], ranks: int) -> dict[str, object]:
    """Return the length, saves and validations of the short run, so that every fault's moment comes."""
    last = max(fault.update for fault in faults)
    exports = [fault for fault in faults if fault.phase == "export"]
    if any(fault.update != last for fault in exports):
        what = f"the export comes after the last update, and there is a fault in update {last}"
        raise ConfigError(what, where=f"--inject {exports[0]}", hint="drill the export by itself")
    for fault in faults:
        if fault.phase in ("validation", "generation") and not config.data.validation:
            raise ConfigError(
                f"there is no {fault.phase} to hit: data.validation is not set", where=f"--inject {fault}"
            )
        if fault.phase == "generation" and not config.validation.generate:
            raise ConfigError("there is no generation to hit: validate.generate is 0", where=f"--inject {fault}")
    saves_at_odd = any(fault.phase == "checkpoint" and fault.update % SAVE_EVERY for fault in faults)
    validates = any(fault.phase in ("validation", "generation") for fault in faults)
    settings: dict[str, object] = {
        "length.updates": last if exports else last + MORE_UPDATES,
        "checkpoint.every": 1 if saves_at_odd else SAVE_EVERY,
        "validate.every": 1 if validates else None,
        "launch.max_restarts": len(faults) + 1,
        "launch.ranks": ranks,
    }
    if any(fault.kind == "hang" for fault in faults):
        settings["launch.hang_seconds"] = min(config.launch.hang_seconds, HANG_SECONDS)
    return settings


def _left_out(config: RunConfig, faults: Sequence[Fault]) -> list[int]:
    """Return the updates that a fault makes the run leave out, so that the other one leaves them out as well."""
    return [f.update for f in faults if f.kind == "nan" and config.optim.on_nonfinite != "stop"]


def _tolerance(config: RunConfig, faults: Sequence[Fault], *, on_gpus: bool) -> float:
    if on_gpus:
        return ROUGH
    if any(fault.kind == "oom" for fault in faults):
        return SMALLER_BATCHES if config.precision.compute == "fp32" else ROUGH
    return 0.0


def _right_codes(config: RunConfig, faults: Sequence[Fault]) -> tuple[int, ...]:
    """Return the exit codes that are right after these faults, by docs/reliability.md."""
    kinds = {fault.kind for fault in faults}
    if "poison" in kinds:
        return (POISON,)
    if "nan" in kinds and config.optim.on_nonfinite == "stop":
        return (NUMBERS_GONE,)
    failing = Counter(fault.update for fault in faults if fault.kind not in HARMLESS and fault.update)
    often = POISON if max(failing.values(), default=0) >= SAME_UPDATE else 0
    return (0, often, OUT_OF_MEMORY if "oom" in kinds else 0)  # the last: where no smaller micro-batch is left


def _verdict(
    config: RunConfig,
    hit: Outcome,
    whole: Outcome,
    faults: Sequence[Fault],
    left_out: Sequence[int],
    tolerance: float,
    say: Callable[[str], None],
) -> int:
    say("")
    never = [fault for fault in faults if fault not in hit.happened]
    found = [f"{fault} did not happen: the run never came there" for fault in never]
    right = _right_codes(config, faults)
    if hit.code not in right:
        found.append(f"the run ended with code {hit.code}, and {right[0]} is right after these faults")
    found += differences(hit, whole, tolerance=tolerance, but=left_out)
    if found:
        say("drill: NOT as it must be:")
        for problem in found:
            say(f"  {problem}")
        return 1
    alike = f"losses are the same within {tolerance:g}" if tolerance else "losses, rates and norms are the same bits"
    if hit.code == 0 and not tolerance:
        alike += ", and so are the final weights"
    say(
        f"drill: passed. {counted(len(faults), 'fault')} happened; the samples of all {len(hit.updates)} updates are "
        f"the same as without them, {alike}" + (f"; it ended with code {hit.code}, as it must" if hit.code else "")
    )
    return 0
