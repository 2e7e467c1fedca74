"""What a run is beyond its tensors, and the seeds of an update."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from typing import Any

import torch


@dataclass
class TrainState:
    """The scalars that a checkpoint's manifest carries. ``update`` counts finished updates.

    ``validated``: the update after which validation was last done, whole; ``validation_loss`` is what it gave.
    """

    update: int = 0
    epoch: int = 0
    validated: int = 0
    validation_loss: float | None = None
    num_bad_in_a_row: int = 0
    best_validation_loss: float | None = None
    precision: dict[str, float] = field(default_factory=dict)
    position: dict[str, Any] | None = None  # of a data stream

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def derive_seed(*parts: int | str) -> int:
    """Hash the parts (seed, update, rank, purpose ...) to a 63-bit seed."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def seed_update(seed: int, update: int, rank: int) -> None:
    """Seed all that is random inside an update (dropout); a resumed run needs no stored generator."""
    torch.manual_seed(derive_seed(seed, update, rank, "update"))
