"""THE STORY of a tuning, read top to bottom: one run to look at, the plan, the trials, the tuned run file."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from unisono.bench.measure import WARM_UP, short_run
from unisono.config.load import Loaded
from unisono.drill.scratch import Interrupted, Outcome, Scratch
from unisono.errors import ConfigError, OutputError, UserError
from unisono.goodput import counted
from unisono.launch.ranks import Machine, decide_ranks, look_at_machine
from unisono.ledger import read_ledger
from unisono.stopping import AGAIN
from unisono.tune.candidates import LeftOut, Seen, Setting, Situation, candidates
from unisono.tune.statistic import LEAST_PAIRS
from unisono.tune.trials import TIME_IS_UP, Budget, DoesNotRun, Seconds, climb
from unisono.tune.write import Result, tuned_text, write

LINES_OF_A_FAILURE = 20


def tune(
    loaded: Loaded,
    given: Sequence[str],
    out: Path,
    *,
    updates: int,
    pairs: int,
    minutes: float,
    force: bool,
    only: Sequence[str],
    say: Callable[[str], None],
) -> int:
    """Measure, and write ``out`` with its evidence; returns 0, 1 if the run itself fails, AGAIN if it was stopped.

    ``only``: keys or variables; others are not tried. Raises UserError before any trial for what cannot be.
    """
    begin, machine = time.monotonic(), look_at_machine()
    ranks = decide_ranks(loaded.config, machine)
    check_out(out, loaded.path, force=force)
    tuned_text(loaded, given, {})  # whether its text can be changed is told before any trial
    say(f"tune: {counted(ranks, 'rank')}, {counted(updates, 'update')} a trial of which {WARM_UP} warm up")
    try:
        with Scratch.beside(loaded, given) as scratch:
            trials = Trials(scratch, short_run(loaded.config, ranks, updates))
            first = trials.look()
            situation = Situation(loaded.config, ranks, machine.gpus, machine.cores, _seen(first), os.environ)
            settings, left_out = chosen(*candidates(situation), only)
            for setting in settings:
                tuned_text(loaded, given, setting.changes)
            _say_plan(settings, left_out, trials.longest_seconds, pairs, minutes, say)
            budget = Budget(60 * minutes - (time.monotonic() - begin), 2 * trials.longest_seconds)
            found = climb(settings, trials.seconds, budget, pairs, say)
            environment = orjson.loads((first.folder / "environment.json").read_bytes())
    except Interrupted:
        say("tune: stopped; nothing is written")
        return AGAIN
    except DoesNotRun as failure:
        say(f"tune: the run file itself does not run: {failure}")
        return 1
    result = Result(found, left_out, ranks, updates - WARM_UP, _words(machine, environment), environment)
    write(loaded, given, out, result)
    kept = sum(evidence.kept for evidence in found)
    say(f"tune: {counted(kept, 'setting')} of {len(found)} kept: {out}, {out.with_suffix('.json')}")
    if late := [evidence.setting.name for evidence in found if evidence.problem == TIME_IS_UP]:
        say(f"tune: {', '.join(late)} did not come to a trial: raise --minutes ({minutes:g}), or name some by --only")
    return 0


def check_out(out: Path, run_file: Path, *, force: bool) -> None:
    """Raise OutputError where writing would destroy something."""
    if out.suffix not in (".yaml", ".yml"):
        raise OutputError(f"{out} is to be a run file", where="--out", hint="name it something.yaml")
    if out.exists() and out.samefile(run_file):
        raise OutputError(f"{out} is the run file itself", where="--out", hint="name another file")
    for file in (out, out.with_suffix(".json")):
        if file.exists() and not force:
            raise OutputError(f"{file} exists", where="--out", hint="name another file, or --force")
    if not out.absolute().parent.is_dir():
        raise OutputError(f"there is no folder {out.absolute().parent}", where="--out")


class Trials:
    """Short runs in a scratch folder, one after another; what they print goes into a file."""

    def __init__(self, scratch: Scratch, fixed: Mapping[str, object]) -> None:
        scratch.modules = ("unisono.tune.worker", "unisono.tune.worker")
        self._scratch = scratch
        self._fixed = fixed
        self._count = 0
        self.longest_seconds = 0.0

    def look(self) -> Outcome:
        """Run the run file twice, and return the second run: the first one prepares the data and fills caches."""
        self._run({})
        self.longest_seconds = 0.0
        return self._run({})

    def seconds(self, settings: Mapping[str, object]) -> Seconds:
        """Return the seconds of the updates that count. Raises DoesNotRun."""
        try:
            outcome = self._run(settings)
        except UserError as error:
            raise DoesNotRun(error.message) from error
        return [line["seconds"] for number, line in sorted(outcome.updates.items()) if number > WARM_UP]

    def _run(self, settings: Mapping[str, object]) -> Outcome:
        self._count += 1
        name, begin = f"trial-{self._count}", time.monotonic()
        said = self._scratch.folder / f"{name}.log"
        with _into(said):
            outcome = self._scratch.run(name, {**self._fixed, **settings})
        self.longest_seconds = max(self.longest_seconds, time.monotonic() - begin)
        if outcome.code:
            raise _failure(outcome, said)
        return outcome


def _failure(outcome: Outcome, said: Path) -> DoesNotRun:
    """Say in a line why a run failed: as its ledger has it, else the last that it printed; and all that came last."""
    lines = said.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    faults = [str(line["what"]) for line in read_ledger(outcome.folder) if line["kind"] == "fault"]
    why = [*faults, *reversed(lines), f"exit code {outcome.code}"][0]
    return DoesNotRun(why, hint="\n".join(["its last lines were", *lines[-LINES_OF_A_FAILURE:]]))


@contextmanager
def _into(file: Path) -> Iterator[None]:
    """Send what this process and the ranks print into a file."""
    streams = (sys.stdout, sys.stderr)
    for stream in streams:
        stream.flush()
    before = [os.dup(number) for number in (1, 2)]
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        for number in (1, 2):
            os.dup2(handle, number)
        yield
    finally:
        for stream in streams:
            stream.flush()
        for number, old in zip((1, 2), before):
            os.dup2(old, number)
            os.close(old)
        os.close(handle)


def _seen(outcome: Outcome) -> Seen:
    events = [line for line in outcome.events if line["update"] > WARM_UP]
    session = next(line for line in read_ledger(outcome.folder) if line["kind"] == "session")
    seconds = math.fsum(line["seconds"] for line in events)
    return Seen(
        strategy=session["strategy"],
        gradient_bytes=session["gradient_bytes"],
        micro_batches=max(line["micro_batches"] for line in events),
        micro_batch_tokens=max(line["micro_batch_tokens"] for line in events),
        data_share=math.fsum(line["spans"].get("data", 0.0) for line in events) / seconds,
    )


def chosen(
    settings: list[Setting], left_out: list[LeftOut], only: Sequence[str]
) -> tuple[list[Setting], list[LeftOut]]:
    """Leave out what ``only`` does not name. Raises ConfigError if it names what there is not."""
    for word in only:
        if not any(word in name for name in [each.name for each in settings] + [each.name for each in left_out]):
            names = ", ".join(each.name for each in settings)
            raise ConfigError(f"--only {word} is none of what there is to try here", hint=f"there are: {names}")
    if only:
        settings = [each for each in settings if any(word in each.name for word in only)]
        left_out = [each for each in left_out if any(word in each.name for word in only)]
    return settings, left_out


def _say_plan(
    settings: Sequence[Setting],
    left_out: Sequence[LeftOut],
    trial_seconds: float,
    pairs: int,
    minutes: float,
    say: Callable[[str], None],
) -> None:
    pair_minutes = len(settings) * 2 * trial_seconds / 60
    shortest, longest = LEAST_PAIRS * pair_minutes, pairs * pair_minutes
    say(
        f"plan: {counted(len(settings), 'setting')}, up to {pairs} pairs of trials each, a trial takes "
        f"{trial_seconds:.0f} s: {shortest:.0f} to {longest:.0f} minutes, at most {minutes:g} (--minutes)"
    )
    for each in settings:
        say(f"  {each.name}: {each.why}")
    if left_out:
        say("not tried:")
    for other in left_out:
        say(f"  {other.name}: {other.reason}")
    say("trials: how many times as fast (and the interval of the noise)")


def _words(machine: Machine, environment: Mapping[str, Any]) -> str:
    """Say what it was measured on."""
    from unisono.plan.machine import cpu_name

    devices = [each["name"] for each in environment["devices"]]
    device = f"{len(devices)} x {devices[0]}" if devices else f"{machine.cores} cores of {cpu_name()}"
    return f"{device}, torch {environment['versions']['torch']}, unisono {environment['versions']['unisono']}"
