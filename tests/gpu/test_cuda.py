"""What only a GPU can show; run by `benchmarks/gpu_check.sh`. Skipped, with the reason, where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.ranks import run_ranks
from support.updates import Settings, assert_same_trace, train_updates

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: run benchmarks/gpu_check.sh on one"),
]

OPTIM = {"name": "adamw", "lr": 1e-3, "schedule": "constant", "warmup": 0, "max_grad_norm": 1.0}


def _on_cpu(rank: int, world: int, folder: Path, settings: Settings) -> object:
    torch.cuda.is_available = lambda: False  # type: ignore[method-assign]
    return train_updates(rank, world, folder, settings)[0]


@pytest.mark.parametrize(("compute", "tolerance"), [("fp32", 1e-4), ("bf16", 0.05), ("fp16", 0.01)])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_ten_updates_on_the_gpu_equal_those_on_the_cpu(
    tiny: Path, compute: str, tolerance: float, packed: bool
) -> None:
    settings = Settings(updates=10, optim=OPTIM, packed=packed)
    expected = run_ranks(_on_cpu, 1, tiny, settings)[0]
    on_gpu = Settings(updates=10, optim=OPTIM, packed=packed, compute=compute, micro_tokens=48)
    assert_same_trace(run_ranks(train_updates, 1, tiny, on_gpu)[0][0], expected, tolerance)


def _attend(rank: int, world: int, dtype: torch.dtype, window: int | None) -> float:
    """Largest difference between the variable-length kernel and fp32 attention per document, output and gradients."""
    from unisono.model.attention import document_attention

    lengths = (130, 1, 513, 64)
    torch.manual_seed(0)
    shapes = [(1, heads, sum(lengths), 64) for heads in (8, 2, 2)]
    exact = [torch.randn(shape, device="cuda").to(dtype).float().requires_grad_() for shape in shapes]
    low = [x.detach().to(dtype).requires_grad_() for x in exact]
    answers = []
    for inputs in (exact, low):
        output, _ = document_attention(
            torch.nn.Identity(), *inputs, None, document_lengths=lengths, sliding_window=window, scaling=None
        )
        output.float().square().sum().backward()
        answers.append([output.float(), *(x.grad.float() for x in inputs)])  # type: ignore[union-attr]
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*answers))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("window", [None, 100])
def test_the_variable_length_kernel_is_exact_per_document(dtype: torch.dtype, window: int | None) -> None:
    assert run_ranks(_attend, 1, dtype, window)[0] < 0.02


def test_ranks_share_gpus_over_nccl(tiny: Path) -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two CUDA devices")
    settings = Settings(updates=5, optim=OPTIM)
    expected = run_ranks(train_updates, 1, tiny, settings)[0][0]
    for (trace,) in run_ranks(train_updates, 2, tiny, settings):
        assert_same_trace(trace, expected, 1e-4)
