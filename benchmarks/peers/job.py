"""A trial's job: what one contestant is asked to do, and what it answers. The driver and all contestants read it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

RESULT = "RESULT "  # begins the one line of output that is the answer
SEED = 0
MAX_GRAD_NORM = 1.0  # what all contestants clip to: TRL's default and unisono's


@dataclass(frozen=True)
class Job:
    """The same work for all: ``updates`` updates over the records in their order, ``global_size`` samples each.

    ``micro_size`` and ``row_tokens`` are the padded and the packed contestants' memory knobs; ``balanced`` asks TRL to
    put samples of like length together within an update; ``folder`` is the trial's own.
    """

    contestant: str
    model: str
    folder: str
    chats: str
    prompts: str
    updates: int
    ranks: int
    global_size: int
    precision: str
    rate: float
    micro_size: int
    row_tokens: int
    packed: bool
    balanced: bool
    allocator: bool

    @property
    def accumulation(self) -> int:
        """Micro-batches of one rank in an update, where they are counted in samples."""
        return self.global_size // (self.micro_size * self.ranks)

    def write(self) -> Path:
        """Write the job into its folder, and return the file."""
        path = Path(self.folder) / "job.json"
        path.write_text(json.dumps(asdict(self), indent=2))
        return path

    @classmethod
    def read(cls, path: str) -> Job:
        """Read a job."""
        return cls(**json.loads(Path(path).read_text()))


def answer(*, seconds: list[float], tokens: list[int], losses: list[float], versions: dict[str, str]) -> None:
    """Print the answer, one entry per update: wall seconds, useful (non-padding) tokens of all ranks, loss."""
    values = {"seconds": seconds, "tokens": tokens, "losses": losses, "versions": versions}
    print(RESULT + json.dumps(values), flush=True)
