"""The run folder: what a run leaves behind and where. The names are stable; see the design, section 5."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from unisono.config.load import Loaded
from unisono.config.render import render
from unisono.data.loader import LeftOutRecord
from unisono.durable import replace_file
from unisono.errors import OutputError
from unisono.ledger import RankLedger
from unisono.metrics.environment import environment
from unisono.metrics.record import JsonLines, cut_after
from unisono.metrics.trackers import TensorBoard, open_trackers

GENERATIONS = "generations"


@dataclass
class RunFolder:
    """Open files of one rank. Rank 0 writes metrics and samples; every rank its own events."""

    path: Path
    metrics: JsonLines | None
    samples: JsonLines | None
    gone: JsonLines | None  # what a stream left out
    events: JsonLines
    ledger: RankLedger | None
    trackers: list[TensorBoard]

    @property
    def model(self) -> Path:
        """The final model's folder."""
        return self.path / "model"

    def line(self, values: dict[str, Any]) -> None:
        """Write one metrics line, here and to the trackers (rank 0)."""
        if self.metrics is not None:
            self.metrics.write(values)
            for tracker in self.trackers:
                tracker.write(values)

    def ids(self, update: int, records: list[int]) -> None:
        """Write the sample ids of an update, if asked for (rank 0)."""
        if self.samples is not None:
            self.samples.write({"update": update, "ids": records})

    def left_out(self, update: int, records: Sequence[LeftOutRecord]) -> None:
        """List records that a stream left out on its way to an update (rank 0)."""
        if self.gone is not None:
            for record in records:
                self.gone.write({"update": update, "place": record.place, "reason": record.reason})

    def answers(self, update: int, answers: list[dict[str, Any]]) -> None:
        """Write what the model answered after an update, one line each; the file is whole or not there (rank 0)."""
        if self.metrics is not None:
            file = self.path / GENERATIONS / f"update-{update:08d}.jsonl"
            file.parent.mkdir(exist_ok=True)
            replace_file(file, b"".join(orjson.dumps(answer) + b"\n" for answer in answers))

    def moment(self, kind: str, **values: object) -> None:
        """Write a line of the ledger of time (rank 0)."""
        if self.ledger is not None:
            self.ledger.note(kind, **values)

    def close(self) -> None:
        """Make everything durable; without a launcher, say where the time went."""
        if self.ledger is not None:
            for sentence in self.ledger.close():
                print(sentence, flush=True)
        for file in (self.metrics, self.samples, self.gone, self.events):
            if file is not None:
                file.close()
        for tracker in self.trackers:
            tracker.close()


def lock(output_dir: str) -> None:
    """Hold the run folder for the life of this process; a second run into it is refused. The kernel lets go at exit."""
    path = Path(output_dir)
    path.mkdir(parents=True, exist_ok=True)
    handle = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(
            f"another process is writing to {path}",
            where="run.output_dir",
            hint="wait for it or stop it, or choose another run.output_dir",
        ) from None


def checkpoints_of(output_dir: str) -> Path:
    """Return the folder of a run's checkpoints."""
    return Path(output_dir) / "checkpoints"


def open_run_folder(loaded: Loaded, *, rank: int, world: int, update: int, validated: int = 0) -> RunFolder:
    """Open the run folder to go on after ``update``: lines of later updates are dropped, they will be done again.

    So are those of validations after update ``validated``.
    """
    config = loaded.config
    path = Path(config.run.output_dir)
    path.mkdir(parents=True, exist_ok=True)
    files = [path / "events" / f"rank{rank}.jsonl"]
    if rank == 0:
        others = [(f.stem.removeprefix("rank"), f) for f in path.glob("events/rank*.jsonl")]
        absent = [f for number, f in others if number.isdecimal() and int(number) >= world]
        files += [
            path / name for name in ("metrics.jsonl", "samples.jsonl", "left_out.jsonl")
        ] + absent  # ranks of a larger world, not here now
    for file in files:
        cut_after(file, update, validated=validated if file.stem == "metrics" else None)
    if rank == 0:
        _drop_answers_after(path / GENERATIONS, min(update, validated))
        replace_file(path / "run.yaml", render(loaded).encode())
        replace_file(path / "environment.json", orjson.dumps(environment(world), option=orjson.OPT_INDENT_2))
    return RunFolder(
        path=path,
        metrics=JsonLines(path / "metrics.jsonl") if rank == 0 else None,
        samples=JsonLines(path / "samples.jsonl") if rank == 0 and config.log.samples else None,
        gone=JsonLines(path / "left_out.jsonl") if rank == 0 and config.data.mode == "stream" else None,
        events=JsonLines(path / "events" / f"rank{rank}.jsonl"),
        ledger=RankLedger(path) if rank == 0 else None,
        trackers=open_trackers(config.log.trackers, path) if rank == 0 else [],
    )


def _drop_answers_after(folder: Path, update: int) -> None:
    for file in folder.glob("update-*.jsonl"):
        number = file.stem.removeprefix("update-")
        if number.isdecimal() and int(number) > update:
            file.unlink()
