"""The tutorial's loop equals ours: the same samples give the same losses, norms and rates."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from support import oracle
from support.ranks import run_ranks
from support.runs import ids_of, make_run, train_whole, updates_of


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "padded"])
def test_the_tutorial_gives_the_same_losses(tiny: Path, tmp_path: Path, pack: bool) -> None:
    file = make_run(
        tmp_path,
        tiny,
        num_samples=32,
        batch={"global_size": 6, "micro_tokens": 96},
        data={"pack": pack},
        optim={"lr": 3e-3, "schedule": "cosine", "warmup": 3, "weight_decay": 0.0, "max_grad_norm": 1.0},
        length={"updates": 10},
    )
    train_whole(2, file)
    ours, ids = updates_of(tmp_path / "run"), ids_of(tmp_path / "run")
    batches = [ids[update] for update in range(1, 11)]
    assert {len(batch) for batch in batches} == {6, 2}, "the rest of an epoch is among them"
    plain, same = run_ranks(oracle.train_plainly, 2, tiny, tmp_path / "data.jsonl", batches, 3e-3, 3)
    assert plain == same
    for key, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4), ("lr", 1e-12)):
        assert [line[key] for line in ours] == pytest.approx([step[key] for step in plain], rel=0, abs=tolerance), key
    assert plain[-1]["loss"] < plain[0]["loss"] - 1, "it must have learned, or equal losses say little"


def test_the_oracle_knows_nothing_of_unisono() -> None:
    tree = ast.parse(Path(oracle.__file__).read_text(encoding="utf-8"))
    imported = [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    imported += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert imported and not [name for name in imported if name.split(".")[0] in {"unisono", "support"}]
