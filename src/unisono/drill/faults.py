"""Faults that a person can plant: ``kind@rank:update:phase``, as in ``kill@1:3:backward``. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unisono.errors import ConfigError
from unisono.pulse import BEFORE, BETWEEN, EXPORT, WITHIN

# how a drill tells its ranks: the faults, where those that happened are noted, where the run saves
PLANTED, DONE, CHECKPOINTS = "UNISONO_FAULTS", "UNISONO_FAULTS_DONE", "UNISONO_FAULTS_CHECKPOINTS"

KINDS: Mapping[str, str] = {
    "kill": "SIGKILL, as by the kernel when memory runs out",
    "segv": "a crash in native code",
    "exit": "sys.exit(0), far too early",
    "leave": "os._exit(0), as some library may do it",
    "raise": "an exception",
    "poison": "an exception, each time that this update comes",
    "hang": "never goes on",
    "slow": "half a second longer, in this phase of this update and of all later ones",
    "stop": "SIGTERM, as by a scheduler",
    "oom": "the memory of the device is used up",
    "nan": "the loss is not a number",
    "enospc": "from here on no file can grow beyond some bytes",
    "torn": "SIGKILL in the middle of writing the checkpoint",
}
AFTER = (*BETWEEN, EXPORT)  # after the update that is named; BEFORE any update theirs is 0


@dataclass(frozen=True)
class Fault:
    """One fault: what, on which rank, at which update (0: before the first), in which phase."""

    kind: str
    rank: int
    update: int
    phase: str

    def __str__(self) -> str:
        """Write it as it is read."""
        return f"{self.kind}@{self.rank}:{self.update}:{self.phase}"


def parse(text: str, *, ranks: int) -> Fault:
    """Read ``kind@rank:update:phase``; ConfigError says what was meant to stand there."""
    kind, _, place = text.partition("@")
    rank, update, phase = [*place.split(":"), "", "", ""][:3]
    problems = []
    if kind not in KINDS:
        problems.append(f"there is no fault '{kind}': " + ", ".join(KINDS))
    if not rank.isdecimal() or int(rank) >= ranks:
        problems.append(f"there is no rank '{rank}': 0 to {ranks - 1}")
    if not update.isdecimal():
        problems.append(f"'{update}' is not the number of an update")
    if phase not in (*BEFORE, *WITHIN, *AFTER) or place.count(":") != 2:
        problems.append(f"there is no phase '{phase}': " + ", ".join((*BEFORE, *WITHIN, *AFTER)))
    elif kind == "torn" and phase != "checkpoint":
        problems.append("torn is a fault of the phase checkpoint")
    elif kind == "nan" and phase != "forward":
        problems.append("nan is a fault of the phase forward")
    elif update.isdecimal() and (phase in BEFORE) != (int(update) == 0):
        problems.append(f"{phase} comes " + ("before any update: 0" if phase in BEFORE else "with updates 1, 2, ..."))
    if problems:
        raise ConfigError("; ".join(problems), where=f"--inject {text}", hint="for example kill@1:3:backward")
    return Fault(kind, int(rank), int(update), phase)


class Plan:
    """Which faults are still to come; those that happened are noted in a folder that outlives the ranks."""

    def __init__(self, faults: Sequence[Fault], done: Path) -> None:
        self.faults = faults
        self._done = done

    @classmethod
    def of_environment(cls) -> Plan:
        """Read what the drill planted."""
        texts = os.environ[PLANTED].split()
        return cls([parse(text, ranks=2**31) for text in texts], Path(os.environ[DONE]))

    def due(self, rank: int, update: int, phase: str) -> list[Fault]:
        """Return the faults of this moment, and note that they happen."""
        found = []
        for fault in self.faults:
            if fault.rank != rank or fault.phase != phase:
                continue
            goes_on = fault.kind == "slow" and update >= fault.update
            if goes_on or (fault.update == update and (fault.kind == "poison" or not self.happened(fault))):
                (self._done / str(fault)).touch()
                found.append(fault)
        return found

    def happened(self, fault: Fault) -> bool:
        """Tell whether the moment of a fault has come."""
        return (self._done / str(fault)).exists()
