"""Short runs of a person's own run file, in a folder that is thrown away, and what sets two of them apart."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from unisono.config.load import Loaded, load
from unisono.config.output import check_output_dir
from unisono.drill.faults import CHECKPOINTS, DONE, PLANTED, Fault, Plan
from unisono.durable import hash_file
from unisono.errors import OutputError
from unisono.goodput import Account, account
from unisono.launch import run
from unisono.launch.environment import applied
from unisono.ledger import read_ledger
from unisono.stopping import AGAIN, Notice, interrupt

OF_THE_CLOCK = ("seconds", "tokens_per_second", "seconds_by_cause", "seconds_by_rank")
KILLED = 128  # exit codes of one who was told twice
MOST_STARTS = 20  # of one run whose faults ask for new starts


class Interrupted(Exception):
    """The person stopped a run of the drill."""


@dataclass
class Outcome:
    """A short run that has ended with ``code``; ``happened`` are the faults whose moment came."""

    folder: Path
    code: int
    happened: list[Fault]

    @cached_property
    def updates(self) -> dict[int, dict[str, Any]]:
        """The metrics lines of updates, by number."""
        return {line["update"]: line for line in self._metrics() if "kind" not in line}

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The newest summary line; empty where no session came to its end."""
        return next((line for line in reversed(self._metrics()) if line.get("kind") == "summary"), {})

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The lines of updates of all ranks."""
        files = sorted((self.folder / "events").glob("rank*.jsonl"))
        return [line for file in files for line in _lines(file) if "micro_batches" in line]

    @cached_property
    def account(self) -> Account:
        """Where the time went."""
        return account(read_ledger(self.folder))

    def ids(self) -> dict[int, list[int]]:
        """The sample ids of each update."""
        return {line["update"]: line["ids"] for line in _lines(self.folder / "samples.jsonl")}

    def model(self) -> dict[str, str]:
        """The files of the final model, and their hashes."""
        folder = self.folder / "model"
        return {file.name: hash_file(file) for file in sorted(folder.glob("*.safetensors"))}

    def _metrics(self) -> list[dict[str, Any]]:
        return _lines(self.folder / "metrics.jsonl")


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


class Scratch:
    """A folder beside the run's own, on the same disk; ``given`` are the overrides of the command line.

    ``modules``: what the ranks run, left alone and with faults planted.
    """

    modules = ("unisono.train", "unisono.drill.worker")

    def __init__(self, loaded: Loaded, given: Sequence[str], folder: Path) -> None:
        self._loaded = loaded
        self._given = given
        self.folder = folder

    @classmethod
    @contextmanager
    def beside(cls, loaded: Loaded, given: Sequence[str]) -> Iterator[Scratch]:
        """Make the folder, and take it away whatever happens."""
        output_dir = Path(loaded.config.run.output_dir).absolute()
        check_output_dir(output_dir)
        place = next(parent for parent in output_dir.parents if parent.is_dir())
        try:
            folder = Path(tempfile.mkdtemp(prefix=".unisono-drill-", dir=place))
        except OSError as error:
            raise OutputError(f"no folder can be made in {place}: {error.strerror}", where="run.output_dir") from error
        stop = Notice()
        try:
            with stop.answering(interrupt), stop.listening():
                yield cls(loaded, given, folder)
        except KeyboardInterrupt:
            raise Interrupted from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def run(self, name: str, settings: Mapping[str, object], faults: Sequence[Fault] = ()) -> Outcome:
        """Run to its end, with ``faults`` planted; a run that stops as asked is started again, as a scheduler would.

        Raises Interrupted when it was the person who asked.
        """
        folder = self.folder / name
        done = self.folder / f"{name}-faults"
        done.mkdir()
        overrides = [*self._given, *(f"{k}={_yaml(v)}" for k, v in {**self._fixed(folder), **settings}.items())]
        planted = {PLANTED: " ".join(map(str, faults)), DONE: str(done), CHECKPOINTS: str(folder / "checkpoints")}
        plan = Plan(faults, done)
        for _ in range(MOST_STARTS):
            stops = {fault for fault in faults if fault.kind == "stop" and plan.happened(fault)}
            with applied(planted):
                code = run(load(self._loaded.path, overrides), overrides, module=self.modules[bool(faults)])
            asked = {fault for fault in faults if fault.kind == "stop" and plan.happened(fault)} - stops
            if code >= KILLED or (code == AGAIN and not asked):
                raise Interrupted
            if code != AGAIN:
                break
        return Outcome(folder, code, [fault for fault in faults if plan.happened(fault)])

    def _fixed(self, folder: Path) -> dict[str, object]:
        """Return the settings of every short run; an update that is left out would miss its fault."""
        return {
            "run.output_dir": folder,
            "checkpoint.resume": "auto",
            "log.samples": True,
            "log.trackers": [],
            "log.profile": "none",
            "length.epochs": None,
            "optim.skip_updates": [],
            "optim.warmup": 0,
            "validate.every": None,
        }


def _yaml(value: object) -> str:
    return str(value) if isinstance(value, Path) else json.dumps(value)


def differences(hit: Outcome, whole: Outcome, *, tolerance: float, but: Sequence[int] = ()) -> list[str]:
    """Say what sets a run apart from one that nothing happened to; updates ``but`` are not compared.

    ``tolerance`` 0 compares lines and weights bit by bit; else losses, relative.
    """
    found = []
    for number in sorted(hit.updates.keys() - set(but)):
        mine, theirs = hit.updates[number], whole.updates.get(number, {})
        if tolerance:
            apart = abs(mine["loss"] - theirs["loss"]) / max(abs(theirs["loss"]), 1e-9)
            same = apart <= tolerance
        else:
            same = _without_clock(mine) == _without_clock(theirs)
        if not same:
            found.append(f"update {number}: loss {mine['loss']}, without the faults {theirs.get('loss')}")
    ids, their_ids = hit.ids(), whole.ids()
    found += [f"update {n} has other samples" for n in sorted(ids) if ids[n] != their_ids.get(n)]
    if hit.code == 0 and hit.updates.keys() != whole.updates.keys():
        found.append(f"{len(hit.updates)} updates were done, without the faults {len(whole.updates)}")
    if hit.code == 0 and not tolerance and hit.model() != whole.model():
        found.append("the final weights differ")
    return found


def _without_clock(line: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key not in OF_THE_CLOCK}
