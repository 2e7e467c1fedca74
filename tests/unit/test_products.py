"""Attention by plain products: the same numbers as the formula, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from unisono.model.attention import document_attention
from unisono.model.products import LONGEST, ShortAttention

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(tokens: int, heads: int = 4, key_heads: int = 2, width: int = 8) -> Tensors:
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(heads, tokens, width), (key_heads, tokens, width), (key_heads, tokens, width)]
    q, k, v = (torch.randn(*shape, generator=generator) for shape in shapes)
    return q, k, v


def formula(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
    """softmax(scale Q K^T + causal) V, in the format of its inputs."""
    groups = len(query) // len(key)
    key, value = (x.repeat_interleave(groups, 0) for x in (key, value))
    scores = query @ key.transpose(1, 2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ value


def with_gradients(way, tensors: Tensors, dtype: torch.dtype, scale: float | None) -> list[torch.Tensor]:
    leaves = [x.to(dtype).requires_grad_() for x in tensors]
    output = way(*leaves, scale)
    weight = torch.linspace(-1, 1, output.numel()).view(output.shape).to(output.dtype)
    (output * weight).sum().backward()
    return [output.detach().double(), *(leaf.grad.double() for leaf in leaves)]


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 2), (3, 1)])
@pytest.mark.parametrize("tokens", [1, 2, 17, 64])
def test_output_and_gradients_are_those_of_the_formula(tokens: int, heads: tuple[int, int], scale: float | None):
    tensors = inputs(tokens, *heads)
    truth = with_gradients(formula, tensors, torch.float64, scale)
    ours = with_gradients(ShortAttention.apply, tensors, torch.float32, scale)
    for mine, true in zip(ours, truth):
        torch.testing.assert_close(mine, true, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [9, 130, 300])
def test_bf16_is_as_near_to_the_truth_as_torchs_kernel(tokens: int):
    def fused(query, key, value, scale):
        key, value = (x.repeat_interleave(2, 0) for x in (key, value))
        return F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True, scale=scale)[0]

    tensors = inputs(tokens, width=64)
    rounded = tuple(x.bfloat16().double() for x in tensors)
    truth = with_gradients(formula, rounded, torch.float64, None)
    theirs = with_gradients(fused, tensors, torch.bfloat16, None)
    ours = with_gradients(ShortAttention.apply, tensors, torch.bfloat16, None)
    for name, mine, other, true in zip(("output", "query", "key", "value"), ours, theirs, truth):
        assert (mine - true).norm() <= 1.3 * (other - true).norm() + 1e-9, name


@pytest.mark.parametrize("others", [(5, 7), (LONGEST + 3, 1)])
def test_neighbours_in_a_row_change_no_bit(others: tuple[int, int]):
    lengths = (others[0], 40, others[1])
    q, k, v = (x[None].bfloat16() for x in inputs(sum(lengths)))
    module = torch.nn.Linear(1, 1)
    packed, _ = document_attention(module, q, k, v, None, document_lengths=lengths)
    part = slice(others[0], others[0] + 40)
    alone, _ = document_attention(module, q[:, :, part], k[:, :, part], v[:, :, part], None, document_lengths=(40,))
    assert torch.equal(packed[:, part], alone)


def test_dropout_windows_and_caps_do_not_come_here(monkeypatch: pytest.MonkeyPatch):
    q, k, v = (x[None].bfloat16() for x in inputs(20))
    monkeypatch.setattr("unisono.model.attention.ShortAttention", None)
    module = torch.nn.Linear(1, 1)
    for settings in ({"dropout": 0.5}, {"sliding_window": 8}, {"softcap": 20.0}):
        document_attention(module, q, k, v, None, document_lengths=(20,), **settings)
    with pytest.raises(AttributeError):  # and without them they do
        document_attention(module, q, k, v, None, document_lengths=(20,))
