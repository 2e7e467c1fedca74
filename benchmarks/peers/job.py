"""A trial's job: what one contestant is asked to do, and what it answers. The driver and all contestants read it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

RESULT = "RESULT "  # begins the one line of output that is the answer
SEED = 0
MAX_GRAD_NORM = 1.0  # what all contestants clip to: TRL's default and unisono's
BETAS, EPS = (0.9, 0.999), 1e-8
LORA_RANK, LORA_ALPHA = 16, 32  # without dropout, on all linear layers but the head

Sample = tuple[list[int], list[int]]  # token ids and labels, which are -100 where there is no loss


@dataclass(frozen=True)
class Job:
    """The same work for all: ``updates`` updates over the samples in their order, ``global_size`` of them each.

    ``data`` holds ``chats.jsonl``, the same as token ids in ``samples.jsonl``, and ``held_out.jsonl``. ``method`` is
    full or lora. ``micro_size``: samples of a micro-batch, or as many as a packed row has on average;
    ``sampling`` is sequential, or how a trainer may choose an update's samples by their lengths, or packed;
    ``weights`` are fp32 or bf16; ``folder`` is the trial's own.
    """

    contestant: str
    model: str
    folder: str
    data: str
    method: str
    updates: int
    ranks: int
    global_size: int
    precision: str
    rate: float
    micro_size: int
    sampling: str
    weights: str
    allocator: bool

    @property
    def accumulation(self) -> int:
        """Micro-batches of one rank in an update."""
        return self.global_size // (self.micro_size * self.ranks)

    @property
    def row_tokens(self) -> int:
        """Tokens of a packed row."""
        lengths = [len(ids) for ids, _ in self.samples()]
        return round(self.micro_size * sum(lengths) / len(lengths))

    @property
    def chats(self) -> str:
        """The file of conversations, for those who render them themselves."""
        return f"{self.data}/chats.jsonl"

    def samples(self) -> list[Sample]:
        """Return what all updates train, in order; where rows are packed some more, as they end where they like."""
        samples = _read(Path(self.data) / "samples.jsonl")
        return samples if self.sampling == "packed" else samples[: self.updates * self.global_size]

    def held_out(self) -> list[Sample]:
        """Return the samples that nobody trains."""
        return _read(Path(self.data) / "held_out.jsonl")

    def tokens(self) -> list[int]:
        """Return the useful tokens of each update, for contestants that keep the samples' order."""
        lengths = [len(ids) for ids, _ in self.samples()]
        size = self.global_size
        return [sum(lengths[update * size : (update + 1) * size]) for update in range(self.updates)]

    def write(self) -> Path:
        """Write the job into its folder, and return the file."""
        path = Path(self.folder) / "job.json"
        path.write_text(json.dumps(asdict(self), indent=2))
        return path

    @classmethod
    def read(cls, path: str) -> Job:
        """Read a job."""
        return cls(**json.loads(Path(path).read_text()))


def _read(path: Path) -> list[Sample]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["ids"], line["labels"]) for line in lines]


def answer(
    *,
    seconds: Sequence[float],
    first_at: float,
    tokens: Sequence[int],
    loss: float,
    versions: dict[str, str],
    loss_before: float | None = None,
) -> None:
    """Print the answer: wall seconds and useful (non-padding) tokens of all ranks of each update, and the losses.

    ``first_at``: when the first update was done, as ``time.time()``. ``loss``: that of the trained model on the
    held-out samples; ``loss_before``: that of the untrained one.
    """
    values = {
        "seconds": list(seconds),
        "first_at": first_at,
        "tokens": list(tokens),
        "loss": loss,
        "loss_before": loss_before,
        "versions": versions,
    }
    print(RESULT + json.dumps(values), flush=True)
