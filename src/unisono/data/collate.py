"""From samples to tensors: one micro-batch with its document boundaries and its targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


class Samples(Protocol):
    """Where samples come from: the token store, or a list in a test."""

    def sample(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return token ids ``[tokens]`` and the target mask ``[tokens]``."""


@dataclass(frozen=True)
class MicroBatch:
    """What goes through the model at a time.

    ``input_ids``, ``position_ids``: int64 ``[rows, tokens]``. ``document_lengths`` covers ``rows * tokens`` in
    row-major order; the padding at the end of a row is a document of its own, so nothing ever attends to it.
    ``attention_mask``: bool ``[rows, tokens]``, true where there is text; None when there is no padding at all.
    ``predictors``: int64 ``[num_targets]``, flat positions whose hidden states predict ``target_ids``
    ``[num_targets]``.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    document_lengths: tuple[int, ...]
    predictors: torch.Tensor
    target_ids: torch.Tensor
    num_tokens: int

    @property
    def num_targets(self) -> int:
        """Count the tokens with a loss."""
        return self.target_ids.numel()

    def inputs(self, device: torch.device) -> dict[str, object]:
        """Return the arguments of the training model's forward, on ``device``."""
        on_device = {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "predictors": self.predictors,
            "target_ids": self.target_ids,
        }
        if self.attention_mask is not None:
            on_device["attention_mask"] = self.attention_mask
        moved: dict[str, object] = {k: v.to(device, non_blocking=True) for k, v in on_device.items()}
        return moved | {"document_lengths": self.document_lengths}


def collate(samples: Samples, indices: NDArray[np.int64], *, packed: bool) -> MicroBatch:
    """Put the samples into one row (``packed``) or into one padded row each."""
    import torch

    pairs = [samples.sample(int(index)) for index in indices]
    lengths = [len(ids) for ids, _ in pairs]
    rows, width = (1, sum(lengths)) if packed else (len(pairs), max(lengths))
    starts = np.cumsum([0, *lengths[:-1]]) if packed else np.arange(rows) * width
    ids = np.zeros(rows * width, np.int64)
    positions = np.zeros(rows * width, np.int64)
    is_text = np.zeros(rows * width, np.bool_)
    is_target = np.zeros(rows * width, np.bool_)
    documents: list[int] = []
    for start, (sample_ids, targets) in zip(starts, pairs):
        span = slice(start, start + len(sample_ids))
        ids[span], is_target[span], is_text[span] = sample_ids, targets, True
        is_target[start] = False  # nothing comes before the first token of a document: it is never predicted
        positions[span] = np.arange(len(sample_ids))
        documents.append(len(sample_ids))
        padding = 0 if packed else width - len(sample_ids)
        if padding:
            documents.append(padding)
    places = np.flatnonzero(is_target)
    return MicroBatch(
        input_ids=torch.from_numpy(ids.reshape(rows, width)),
        position_ids=torch.from_numpy(positions.reshape(rows, width)),
        attention_mask=None if is_text.all() else torch.from_numpy(is_text.reshape(rows, width)),
        document_lengths=tuple(documents),
        predictors=torch.from_numpy(places - 1),
        target_ids=torch.from_numpy(ids[places]),
        num_tokens=sum(lengths),
    )


def empty_micro_batch() -> MicroBatch:
    """Return a micro-batch of one token and no target: it takes part in every collective and adds nothing."""
    import torch

    nothing = torch.zeros(0, dtype=torch.int64)
    one = torch.zeros(1, 1, dtype=torch.int64)
    return MicroBatch(one, one.clone(), None, (1,), nothing, nothing.clone(), 0)
