"""What only a GPU can show; run by `benchmarks/gpu_check.sh`. Skipped, with the reason, where there is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.ranks import run_ranks
from support.tiny import save_tiny
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


@pytest.mark.parametrize("name", ["adamw8bit", "adamw_bf16"])
def test_lean_moments_on_the_gpu_go_where_they_go_on_the_cpu(tmp_path: Path, name: str) -> None:
    """The CUDA kernel of 8 bits is another code than the CPU's; what is drawn at random is the same on both."""
    model = save_tiny(tmp_path / "model", hidden_size=256, intermediate_size=320)
    settings = Settings(updates=6, optim=OPTIM | {"name": name})
    expected = run_ranks(_on_cpu, 1, model, settings)[0]
    assert_same_trace(run_ranks(train_updates, 1, model, settings)[0][0], expected, tolerance=5e-3)


def _recomputing(rank: int, world: int, folder: Path, settings: Settings) -> tuple[list[float], int]:
    torch.cuda.reset_peak_memory_stats()
    trace = train_updates(rank, world, folder, settings)[0]
    return trace.losses, torch.cuda.max_memory_allocated()


def test_computing_again_changes_no_loss_and_takes_less_memory(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", hidden_size=512, intermediate_size=1024, num_hidden_layers=8)
    run = Settings(shapes=[(100, 100)] * 64, global_size=64, updates=2, optim=OPTIM, compute="bf16", micro_tokens=20000)
    ways = ("none", "selective", "full", "offload")
    found = [run_ranks(_recomputing, 1, model, replace(run, checkpointing=way))[0] for way in ways]
    for losses, _ in found[1:]:
        assert losses == pytest.approx(found[0][0], rel=1e-5)
    sizes = [size for _, size in found]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes), dict(zip(ways, sizes))


def _of_parts_in_host_memory(rank: int, world: int, folder: Path, settings: Settings) -> tuple[list[float], int]:
    """Return the losses and the bytes of the GPU that remain when an update is over."""
    remaining: list[int] = []

    def watch(training: torch.nn.Module, place: Any) -> None:
        training.register_forward_pre_hook(lambda *_: remaining.append(torch.cuda.memory_allocated()))

    trace = train_updates(rank, world, folder, replace(settings, prepare=watch))[0]
    return trace.losses, remaining[-1]


def test_parts_in_host_memory_take_none_of_the_gpu_s(tmp_path: Path) -> None:
    """Weights, gradients and moments wait on the host: between updates a rank has next to nothing on its GPU."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    model = save_tiny(tmp_path / "model", hidden_size=512, intermediate_size=1024, num_hidden_layers=8)
    run = Settings(shapes=[(100, 100)] * 8, updates=3, optim=OPTIM, compute="bf16", strategy="fsdp2")
    kept, offloaded = (
        run_ranks(_of_parts_in_host_memory, 2, model, each)[0] for each in (run, replace(run, cpu_offload=True))
    )
    assert offloaded[0] == pytest.approx(kept[0], rel=1e-4)
    assert offloaded[1] < kept[1] / 5


def test_gradients_that_are_let_go_in_backward_take_no_memory(tmp_path: Path) -> None:
    """Weights and moments of fp32 remain: 12 bytes a parameter in place of 16, beside one gradient."""
    model = save_tiny(tmp_path / "model", hidden_size=512, intermediate_size=1024, num_hidden_layers=8)
    free = OPTIM | {"max_grad_norm": None}
    run = Settings(shapes=[(10, 10)] * 4, global_size=4, updates=3, optim=free)
    after = run_ranks(_recomputing, 1, model, run)[0]
    inside = run_ranks(_recomputing, 1, model, replace(run, optim=free | {"in_backward": True}))[0]
    assert inside[0] == pytest.approx(after[0], rel=1e-5)
    assert inside[1] < 0.85 * after[1]
