"""What has been measured: a line of JSON a trial, appended as soon as it has ended. An interruption loses nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from cell import Cell
from contestants import REFERENCE
from trial import Trial


class Results:
    """The trials of one file that were made with these settings; others stay in the file, and are not looked at."""

    def __init__(self, path: Path, settings: dict[str, object]) -> None:
        self._path = path
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole, _, torn = text.rpartition("\n")
        if torn:  # the machine stopped while a line was written
            path.write_text(whole + "\n" if whole else "", encoding="utf-8")
        self._trials = [Trial(**json.loads(line)) for line in whole.splitlines()]
        self.settings = settings

    @property
    def trials(self) -> Sequence[Trial]:
        """The trials, in the order in which they were made."""
        return [trial for trial in self._trials if trial.settings == self.settings]

    def add(self, trial: Trial) -> None:
        """Append a trial to the file."""
        self._trials.append(trial)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(trial)) + "\n")

    def has(self, cell: Cell, contestant: str, number: int) -> bool:
        """Tell whether this has been tried; what failed once is not tried in later rounds."""
        return any(
            t.cell == str(cell) and t.contestant == contestant and (t.round == number or t.failure is not None)
            for t in self.trials
        )

    def reference(self, cell: Cell) -> Trial | None:
        """Return the trial that judges the others of the cell."""
        name = str(cell.of_reference)
        found = [t for t in self.trials if t.cell == name and t.contestant == REFERENCE and t.failure is None]
        return found[-1] if found else None

    def expected_seconds(self, cell: Cell, contestant: str) -> float:
        """Return how long a trial took the last time; else the longest of its cell; else of all; else two minutes."""
        like = [t for t in self.trials if t.cell == str(cell)]
        for some in ([t for t in like if t.contestant == contestant][-1:], like, self.trials):
            if some:
                return max(t.took for t in some)
        return 120.0
