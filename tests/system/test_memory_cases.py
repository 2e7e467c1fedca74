"""Memory that stays where it was: while validating (B46), while saving (B47), and before update 1 (B48)."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from support.ranks import run_ranks
from support.resident import give_back_what_is_freed, kernel_bytes, risen
from support.runs import make_run, updates_of
from support.tiny import save_tiny

MB = 10**6
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def write_samples(file: Path, lengths: list[int]) -> str:
    """Write one sample a line; a letter is a token, and a few more make the sample's frame."""
    with file.open("w") as out:
        for number, length in enumerate(lengths):
            out.write(json.dumps({"prompt": f"{number:02d}", "completion": "a" * length}) + "\n")
    return str(file)


def rise_while_validating(rank: int, world: int, file: Path, overrides: tuple[str, ...]) -> int:
    """Train; returns the most bytes of tensors that there were at once in a validation, of those that it made.

    Tensors are counted while they live: the process keeps memory that was freed, now more and now less of it.
    """
    from unisono import train
    from unisono.evaluation import Validation

    spec = importlib.util.spec_from_file_location("plan_truth", BENCHMARKS / "plan_truth.py")
    assert spec is not None and spec.loader is not None
    plan_truth = sys.modules["plan_truth"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plan_truth)
    peaks, measure = [], Validation.measure

    def measured(*args: Any, **kwargs: Any) -> bool:
        with plan_truth.Live() as live:
            answer = measure(*args, **kwargs)
        peaks.append(live.peak)
        return answer

    Validation.measure = measured  # type: ignore[method-assign]
    train.start([str(file), *overrides])
    return max(peaks)


def test_b46_memory_of_a_validation_does_not_grow_with_its_set(tmp_path: Path) -> None:
    """Kept logits of 48 samples more, of 128 tokens and a vocabulary of 8,000, would be 197 MB."""
    base = save_tiny(tmp_path / "base", vocabulary=8000)
    write_samples(tmp_path / "few.jsonl", [110] * 16)
    write_samples(tmp_path / "many.jsonl", [110] * 64)
    file = make_run(tmp_path, base, length={"updates": 1}, batch={"micro_tokens": 512}, validate={"every": 1})
    rises = {}
    for name in ("few", "many"):
        own = (f'data.validation=["{tmp_path}/{name}.jsonl"]', f"run.output_dir={tmp_path}/{name}")
        rises[name] = run_ranks(rise_while_validating, 1, file, own)[0]
    assert rises["few"] > 8 * MB, "a chunk of logits at least"
    assert abs(rises["many"] - rises["few"]) < 20 * MB, rises


def try_under_limit(rank: int, world: int, file: Path, overrides: tuple[str, ...], room: int) -> str:
    """Train with ``room`` bytes of address space left when the fullest micro-batch is tried (as ulimit -v sets it)."""
    import resource

    from unisono import train
    from unisono.errors import OutOfMemoryError
    from unisono.memory import try_fullest

    def limited(*args: Any, **kwargs: Any) -> None:
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (kernel_bytes("VmSize") + room, before[1]))
        try_fullest(*args, **kwargs)
        resource.setrlimit(resource.RLIMIT_AS, before)

    train.try_fullest = limited  # type: ignore[attr-defined]
    try:
        train.start([str(file), *overrides])
    except OutOfMemoryError as error:
        return str(error)
    return "fits"


def test_b48_a_limit_on_memory_is_met_before_update_1(tmp_path: Path) -> None:
    """Fifty short samples fit and one of 1,024 tokens at the end does not: its length and its record are told."""
    base = save_tiny(tmp_path / "base", vocabulary=8000, hidden_size=256, intermediate_size=512)
    short, long = write_samples(tmp_path / "short.jsonl", [16] * 50), tmp_path / "long.jsonl"
    write_samples(long, [16] * 50 + [1000])
    file = make_run(tmp_path, base, batch={"micro_size": 1}, length={"updates": 1}, optim={"name": "sgd"})
    told = {}
    for name in (short, str(long)):
        own = (f'data.train=["{name}"]', f"run.output_dir={tmp_path}/{Path(name).stem}")
        told[name] = run_ranks(try_under_limit, 1, file, own, 40 * MB)[0]
    assert told[short] == "fits", told[short]
    assert "out of memory with batch.micro_size 1" in told[str(long)]
    assert "the fullest micro-batch (1 samples, 1,0" in told[str(long)] and "is record 50" in told[str(long)]
    assert not updates_of(tmp_path / "long")


def rise_while_saving(rank: int, world: int, file: Path, mode: str) -> tuple[int, int, int]:
    """Train sharded; returns the highest rise in a save, the bytes of this rank's share, and of the largest tensor."""
    from torch.distributed.tensor import DTensor

    from unisono import saving, train

    give_back_what_is_freed()
    rises: list[tuple[int, int, int]] = []

    def local(tensor: Any) -> int:
        return int((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes)

    def measured(self: Any, tensors: dict[str, Any], manifest: Any) -> None:
        def save_and_wait() -> None:
            write(self, tensors, manifest)
            self._background.wait()

        rise, _ = risen(save_and_wait)
        rises.append((rise, sum(map(local, tensors.values())), max(each.nbytes for each in tensors.values())))

    write, saving.Saver._write = saving.Saver._write, measured  # type: ignore[method-assign]
    train.start([str(file), f"checkpoint.mode={mode}", f"run.output_dir={file.parent}/{mode}"])
    return max(rises)


BIG = {"vocabulary": 8000, "hidden_size": 320, "intermediate_size": 1280, "num_hidden_layers": 4}
BIG_BYTES, LARGEST_BYTES = 45_067_520, 4 * 8000 * 320


@pytest.mark.parametrize("mode", ["background", "wait"])
def test_b47_a_save_takes_no_more_than_a_ranks_own_share(tmp_path: Path, mode: str) -> None:
    """11.3 M parameters, 45 MB, and as much again in momentum; a rank's share is half of it."""
    sections = {"length": {"updates": 2}, "checkpoint": {"every": 1}, "strategy": {"name": "fsdp2"}}
    optim = {"name": "sgd", "momentum": 0.9}
    file = make_run(tmp_path, save_tiny(tmp_path / "base", **BIG), optim=optim, **sections)
    for rise, share, largest in run_ranks(rise_while_saving, 2, file, mode):
        assert share == pytest.approx(BIG_BYTES, rel=0.01) and largest == LARGEST_BYTES
        assert rise <= (share if mode == "background" else 0) + largest + 5 * MB, (rise, share, largest)


def rise_while_handing_over(rank: int, world: int, file: Path) -> int:
    """Train sharded; returns the rise while the model is handed over for the second time."""
    from unisono import train

    give_back_what_is_freed()
    hand_over = train.hand_over  # type: ignore[attr-defined]
    rises = []

    def measured(model: Any, source: Path, folder: Path, **settings: Any) -> None:
        hand_over(model, source, folder.with_name("first"), **settings)
        rises.append(risen(hand_over, model, source, folder, **settings)[0])

    train.hand_over = measured  # type: ignore[attr-defined]
    train.start([str(file)])
    return rises[0]


def test_b47_the_model_is_handed_over_tensor_by_tensor(tmp_path: Path) -> None:
    """Of 45 MB, 10 MB in one tensor: rank 1 has one tensor at a time, rank 0 two; gloo's own buffer is another.

    With all of them at once rank 0 had 40 MB.
    """
    from transformers import AutoModelForCausalLM

    base = save_tiny(tmp_path / "base", **BIG)
    optim = {"name": "sgd", "momentum": 0, "lr": 1e-9}
    file = make_run(tmp_path, base, optim=optim, length={"updates": 1}, strategy={"name": "fsdp2"})
    first, second = run_ranks(rise_while_handing_over, 2, file)
    assert second <= 2 * LARGEST_BYTES + 4 * MB and first <= 3 * LARGEST_BYTES + 4 * MB, (first, second)
    ours, theirs = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "run/model", base))
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert float((mine - other).detach().abs().max()) < 1e-6, name
