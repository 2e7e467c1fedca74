"""What is to be prepared, and where its records went."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from unisono.config.schema import Targets, WhenOverlong
from unisono.data.records import Shape
from unisono.data.source.files import SourceFile


@dataclass(frozen=True)
class Job:
    """Files to prepare, and everything that the result depends on besides their content."""

    files: tuple[SourceFile, ...]
    shape: Literal["auto"] | Shape
    fields: tuple[tuple[str, str], ...]
    targets: Targets
    max_length: int
    overlong: WhenOverlong
    on_error: Literal["stop", "skip"]
    max_skipped: int
    validation_share: float
    tokenizer_dir: Path
    trust_remote_code: bool


@dataclass(frozen=True)
class Counts:
    """Where the records went: ``records`` is the sum of kept, the two dropped and skipped.

    ``kept_*`` count records, ``samples`` what they became (a split text becomes several); ``samples``, ``tokens`` and
    ``targets`` cover training and validation part together. ``dropped_tokens`` is what the dropped ones had (a lower
    bound: huge ones are not tokenised); ``open_answers`` are answers to which the chat template gives no end marker;
    ``cut_prompts`` are samples whose prompt lost its beginning.
    """

    records: int = 0
    kept: int = 0
    kept_validation: int = 0
    dropped_overlong: int = 0
    dropped_no_target: int = 0
    skipped_bad: int = 0
    samples: int = 0
    tokens: int = 0
    targets: int = 0
    dropped_tokens: int = 0
    open_answers: int = 0
    cut_prompts: int = 0

    @property
    def num_left_out(self) -> int:
        """Count the records that are not kept."""
        return self.dropped_overlong + self.dropped_no_target + self.skipped_bad

    def __add__(self, other: Counts) -> Counts:
        """Count both together."""
        names = [field.name for field in fields(self)]
        mine, theirs = vars(self), vars(other)
        return Counts(**{name: mine[name] + theirs[name] for name in names})

    def sentence(self) -> str:
        """Say in one line what became of the records."""
        lost = self.dropped_overlong + self.dropped_no_target
        parts = [f"{self.records:,} records: {self.kept:,} kept, {lost:,} dropped"]
        reasons = [
            f"{count:,} {why}"
            for count, why in (
                (self.dropped_overlong, "longer than data.max_length"),
                (self.dropped_no_target, "without a target"),
            )
            if count
        ]
        if reasons:
            parts[0] += f" ({', '.join(reasons)})"
        if self.skipped_bad:
            parts.append(f"{self.skipped_bad:,} skipped as bad")
        if self.cut_prompts:
            parts.append(f"{self.cut_prompts:,} prompts cut to data.max_length")
        if self.samples > self.kept:
            parts.append(f"split into {self.samples:,} samples")
        return ", ".join(parts)


@dataclass(frozen=True)
class LeftOut:
    """A record that is not in the store: which file of the job, the place in it, why."""

    file: int
    place: str
    kind: Literal["overlong", "no_target", "bad"]
    reason: str

    def at(self, job: Job) -> str:
        """Name its file and place."""
        return f"{job.files[self.file].name}:{self.place}"

    def line(self, job: Job) -> str:
        """Name its file and place, and say why it is left out."""
        return f"{self.at(job)}: {self.reason}"
