"""The regression gate's parts: all products of a step are in the floor, and a ratio that fell fails."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from support.tiny import save_tiny
from unisono.config.schema import ModelSection
from unisono.data.collate import MicroBatch, collate
from unisono.loss import TrainingModel
from unisono.model.load import load_model

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def quick() -> ModuleType:
    """The program; its neighbours come with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import floor  # noqa: F401
        import quick

        return quick


@pytest.fixture(scope="module")
def floor(quick: ModuleType) -> ModuleType:
    return sys.modules["floor"]


@pytest.fixture(scope="module")
def gate(quick: ModuleType) -> ModuleType:
    return sys.modules["quick_figures"]


class Two:
    """Two documents, the second half of each being targets."""

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        length = (13, 8)[index]
        return np.arange(length, dtype=np.int32), np.arange(length) >= length // 2


def micro_batch() -> MicroBatch:
    return collate(Two(), np.array([0, 1]), packed=True)


@pytest.mark.parametrize("tied", [False, True])
def test_the_floor_has_every_product_of_a_step(floor: ModuleType, tmp_path: Path, tied: bool) -> None:
    """torch counts the products of a real step, those of attention apart; in bf16, as it overlooks ``addmm_``."""
    model = load_model(ModelSection(path="x"), save_tiny(tmp_path, tied=tied), weights=torch.float32, seed=0)
    batch = micro_batch()
    training = TrainingModel(model, document_attention=True).train()
    with FlopCounterMode(display=False) as counter:
        with torch.autocast("cpu", torch.bfloat16):
            loss = training(**batch.inputs(torch.device("cpu")))
        loss.backward()
    counts = {str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()}
    linear = sum(flops for operator, flops in counts.items() if operator in ("aten.mm", "aten.addmm"))
    products = floor.shapes_of(model).products(batch.num_tokens, batch.num_targets)
    assert sum(each.flops for each in products) == linear > 0


def test_where_all_tokens_are_targets_it_is_six_a_weight_and_token(floor: ModuleType, tiny: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny)
    weights = sum(each.weight.numel() for each in model.modules() if isinstance(each, torch.nn.Linear))
    assert sum(each.flops for each in floor.shapes_of(model).products(100, 100)) == 3 * 2 * 100 * weights


def test_products_that_are_no_linear_layers_are_named(floor: ModuleType, tiny: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny)
    model.model.layers[1].router = torch.nn.Bilinear(2, 2, 2)
    with pytest.raises(SystemExit, match=r"layers\.1\.router\.weight"):
        floor.shapes_of(model)


def test_the_multiplier_multiplies_that_and_no_more(floor: ModuleType, tiny: Path) -> None:
    from transformers import AutoModelForCausalLM

    shapes = floor.shapes_of(AutoModelForCausalLM.from_pretrained(tiny))
    multiplier = floor.Multiplier(shapes, 21, torch.float32)
    with FlopCounterMode(display=False) as counter:
        multiplier.linears(21, 10)
    assert counter.get_total_flops() == sum(each.flops for each in shapes.products(21, 10))
    with FlopCounterMode(display=False) as counter:
        multiplier.attention([13, 8])
    assert counter.get_total_flops() == 6 * 2 * shapes.layers * shapes.heads * shapes.width * (13**2 + 8**2)


def test_another_cut_than_the_runs_is_refused(floor: ModuleType, tmp_path: Path) -> None:
    batch = micro_batch()
    (tmp_path / "events").mkdir()
    line = {"update": 2, "micro_batches": 1, "micro_batch_tokens": batch.num_tokens}
    file = tmp_path / "events/rank1.jsonl"
    file.write_text(json.dumps(line))
    floor.check_same([batch], tmp_path, 1, 2)
    file.write_text(json.dumps(line | {"micro_batch_tokens": 20}))
    with pytest.raises(SystemExit, match=r"update 2 of rank 1 had .* \(1, 20\), not \(1, 21\)"):
        floor.check_same([batch], tmp_path, 1, 2)


def figures_of(gate: ModuleType):
    tokens = {"2": 100, "3": 300}
    trials = [
        gate.Trial("ours-2", {"2": 1.0, "3": 3.0}, tokens, exposed=0.02, waiting=0.01),
        gate.Trial("tutorial-2", {"2": 2.0, "3": 6.0}, tokens),
        gate.Trial("ours-1", {"2": 1.0, "3": 2.8}, tokens),
        gate.Trial("tutorial-2", {"2": 2.0, "3": 6.0}, tokens),
        gate.Trial("ours-2", {"2": 1.0, "3": 3.0}, tokens, exposed=0.04, waiting=0.03),
    ]
    floors = {"ours-2": [gate.Floor({"2": 0.5, "3": 1.3}, {"2": 0.1, "3": 0.1}, 0.4)]}
    return gate.figures(trials, floors)


def test_ratios_come_from_the_same_updates(gate: ModuleType) -> None:
    found = figures_of(gate)
    assert found.times_tutorial == pytest.approx(2.0)
    assert found.share_of_floor == pytest.approx(0.45)
    assert found.two_by_one == pytest.approx(0.95)
    assert (found.exposed, found.waiting) == (pytest.approx(0.03), pytest.approx(0.02))
    assert found.share_of_floor_one is None


def test_a_ratio_far_below_fails_and_says_which(gate: ModuleType) -> None:
    found = figures_of(gate)
    bounds = {"times_tutorial": 2.8, "share_of_floor": 0.64, "two_by_one": 1.0}
    assert gate.problems(found, bounds) == []  # 0.71, 0.703 and 0.95 of them
    (only,) = gate.problems(replace(found, times_tutorial=1.9), bounds)
    assert only.startswith("times as fast as the loop of a tutorial: 1.9, at least 1.96") and "0.7 x" in only
    assert len(gate.problems(replace(found, share_of_floor=0.1, two_by_one=0.5), bounds)) == 2
    assert gate.problems(replace(found, share_of_floor=None), bounds) == []


def test_bounds_are_kept_by_kind_and_format(gate: ModuleType, tmp_path: Path) -> None:
    file, found = tmp_path / "bounds.json", figures_of(gate)
    assert gate.read_bounds(file, "amx", "bf16") is None
    gate.store_bounds(file, "amx", "bf16", found, {"cpu": "x"})
    gate.store_bounds(file, "other", "fp32", replace(found, times_tutorial=1.5), {"cpu": "y"})
    assert gate.read_bounds(file, "amx", "bf16")["times_tutorial"] == 2.0
    assert gate.read_bounds(file, "other", "fp32")["times_tutorial"] == 1.5
    assert gate.read_bounds(file, "amx", "fp32") is None
    with pytest.raises(SystemExit, match="matrix products"):
        gate.store_bounds(file, "amx", "bf16", replace(found, share_of_floor=None), {})


@pytest.mark.parametrize(
    ("flags", "kind"),
    [("fpu avx512_bf16 amx_bf16 amx_tile", "amx"), ("fpu avx512_bf16", "avx512_bf16"), ("fpu avx2", "other")],
)
def test_the_kind_of_cpu(gate: ModuleType, flags: str, kind: str) -> None:
    assert gate.cpu_kind(f"model name\t: amx_bf16\nflags\t\t: {flags}\n") == kind


def test_the_table_says_what_was_not_measured(gate: ModuleType) -> None:
    found = replace(figures_of(gate), two_by_one=None)
    lines = gate.table(found, {"times_tutorial": 1.0, "share_of_floor": 0.4, "two_by_one": 1.0})
    assert any("tutorial" in line and "2.00" in line and "0.70" in line for line in lines)
    assert any("2 processes against 1" in line and "no time" in line for line in lines)


def test_a_fallen_ratio_ends_with_code_1_and_says_what_to_do(quick: ModuleType, gate: ModuleType, capsys) -> None:
    found = figures_of(gate)
    assert quick.verdict(found, {"times_tutorial": 3.0, "share_of_floor": 0.4, "two_by_one": 1.0}, "amx", "bf16") == 1
    said = capsys.readouterr().out
    assert "too slow: times as fast as the loop of a tutorial: 2, at least 2.1" in said and "--store" in said
    assert quick.verdict(found, {"times_tutorial": 2.0, "share_of_floor": 0.4, "two_by_one": 1.0}, "amx", "bf16") == 0
    assert quick.verdict(found, None, "amx", "bf16") == 0
    assert "nothing is stored for this kind of CPU (amx, bf16)" in capsys.readouterr().out


class Slow:
    """A bench whose turns take a minute each by its own clock."""

    now = 0.0

    def take(self, turn: str) -> str:
        self.now += 60.0
        return ""


@pytest.mark.parametrize(("limit", "num_left_out"), [(1000, 0), (250, 4), (10, 7)])
def test_turns_that_would_end_late_are_left_out(quick: ModuleType, monkeypatch, limit: float, num_left_out: int):
    bench = Slow()
    monkeypatch.setattr(quick.time, "monotonic", lambda: bench.now)
    left_out = quick.take_turns(bench, limit, lambda text: None)
    assert left_out == list(quick.ORDER[len(quick.ORDER) - num_left_out :])
