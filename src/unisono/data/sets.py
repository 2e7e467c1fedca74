"""The prepared samples set by set: each source, each validation set, wherever its store lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from unisono.data.prepare import Part, Prepared
from unisono.data.store import Store


@dataclass(frozen=True, eq=False)
class SampleSet:
    """One source's training samples, or one validation set.

    part: what they were made of. is_share: a validation set that is a share of a source; the part is then the source's.
    """

    kind: Literal["train", "validation"]
    name: str
    part: Part
    store: Store
    is_share: bool = False

    @property
    def label(self) -> str:
        """What a person calls it: train, train web, validation ..."""
        return f"{self.kind} {self.name}".rstrip()


def training_sets(prepared: Prepared) -> list[SampleSet]:
    """Return the sources, in the order in which ``Prepared.train`` has them."""
    return [SampleSet("train", part.name, part, part.store("train")) for part in prepared.parts if part.kind == "train"]


def validation_sets(prepared: Prepared) -> list[SampleSet]:
    """Return the validation sets: those with files of their own, or the shares of the sources."""
    own = [part for part in prepared.parts if part.kind == "validation"]
    shared = [part for part in prepared.parts if part.job.validation_share]
    return [
        *(SampleSet("validation", part.name, part, part.store("train")) for part in own),
        *(SampleSet("validation", part.name, part, part.store("validation"), is_share=True) for part in shared),
    ]
