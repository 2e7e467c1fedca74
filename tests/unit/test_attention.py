"""Packed documents do not see each other, on every attention that is offered (B24)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from support.updates import MemoryStore, make_store
from unisono.config.schema import ModelSection
from unisono.data.collate import MicroBatch, collate
from unisono.loss import TrainingModel
from unisono.model.load import load_model

BACKENDS = ["document", "sdpa", "eager"]
A_AND_B = [(1, 4), (1, 6)]  # 5 and 7 tokens, 4 and 6 targets


def load(folder: Path, attention: str) -> TrainingModel:
    model = load_model(ModelSection(path=str(folder), attention=attention), folder, weights=torch.float32, seed=0)
    return TrainingModel(model, document_attention=attention == "document").eval()


@torch.no_grad()
def logits(model: TrainingModel, batch: MicroBatch) -> torch.Tensor:
    hidden = model.hidden(batch.input_ids, batch.position_ids, batch.document_lengths, batch.attention_mask)
    return model.logits(hidden).flatten(0, 1)


def token_losses(model: TrainingModel, batch: MicroBatch) -> torch.Tensor:
    return F.cross_entropy(logits(model, batch)[batch.predictors], batch.target_ids, reduction="none")


def one(store: MemoryStore, *indices: int, packed: bool = True) -> MicroBatch:
    import numpy as np

    return collate(store, np.array(indices), packed=packed)


@pytest.mark.parametrize("backend", BACKENDS)
def test_b24_packed_equals_alone(tiny: Path, backend: str) -> None:
    model, store = load(tiny, backend), make_store(A_AND_B)
    alone = torch.cat([token_losses(model, one(store, k)) for k in (0, 1)])
    packed = one(store, 0, 1)
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]]
    assert packed.num_targets == 4 + 6
    assert packed.attention_mask is None
    torch.testing.assert_close(token_losses(model, packed), alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_b24_padded_equals_alone(tiny: Path, backend: str) -> None:
    model, store = load(tiny, backend), make_store(A_AND_B)
    alone = torch.cat([token_losses(model, one(store, k)) for k in (0, 1)])
    torch.testing.assert_close(token_losses(model, one(store, 0, 1, packed=False)), alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_b24_changing_a_does_not_move_b(tiny: Path, backend: str) -> None:
    model, store = load(tiny, backend), make_store(A_AND_B)
    before = logits(model, one(store, 0, 1))[5:]
    store.ids[0] = (store.ids[0] + 1) % 256
    assert float((logits(model, one(store, 0, 1))[5:] - before).abs().max()) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_b24_an_all_ones_mask_changes_nothing_for_us(tiny: Path, backend: str) -> None:
    """The trap is a mask of ones that hides the boundaries: a packed batch never carries a mask."""
    model, store = load(tiny, backend), make_store(A_AND_B)
    batch = one(store, 0, 1)
    if backend == "document":
        ones = torch.ones_like(batch.input_ids, dtype=torch.bool)
        with_mask = model.hidden(batch.input_ids, batch.position_ids, batch.document_lengths, ones)
        without = model.hidden(batch.input_ids, batch.position_ids, batch.document_lengths)
        assert torch.equal(with_mask, without)
    assert "attention_mask" not in batch.inputs(torch.device("cpu"))


@pytest.mark.parametrize("window", [1, 3, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_windows_and_soft_caps_are_exact(window: int, softcap: float | None) -> None:
    """Against the textbook formula on every document alone."""
    from unisono.model.attention import document_attention

    torch.manual_seed(0)
    lengths = (5, 1, 8)
    q, k, v = torch.randn(1, 4, 14, 8), torch.randn(1, 2, 14, 8), torch.randn(1, 2, 14, 8)
    ours, _ = document_attention(
        torch.nn.Identity(),
        q,
        k,
        v,
        None,
        scaling=0.3,
        sliding_window=window,
        softcap=softcap,
        document_lengths=lengths,
    )
    place, document = torch.arange(14), torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    distance = place[:, None] - place[None]
    allowed = (document[:, None] == document[None]) & (distance >= 0) & (distance < window)
    scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) * 0.3
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    expected = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(ours, expected.transpose(1, 2), rtol=1e-5, atol=1e-5)
