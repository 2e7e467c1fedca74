"""A model whose padding token is its end token still learns to stop (B21): real training, real generation."""

from __future__ import annotations

import json
from pathlib import Path

from support.ranks import run_ranks
from support.runs import make_run, run_training
from support.tiny import save_tiny

PAIRS = {f"{letter}?": letter.lower() * count for count, letter in enumerate("ABCDEFGH", 1)}


def _answers(rank: int, world: int, folder: Path) -> dict[str, str]:
    from unisono.export.generate import generate

    return {question: generate(folder, question, max_new_tokens=32) for question in PAIRS}


def test_b21_greedy_output_stops_after_the_answer(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model", pad_is_eos=True)
    file = make_run(
        tmp_path,
        model,
        batch={"global_size": 8},
        optim={"lr": 1e-2, "warmup": 10},
        length={"updates": 200},
        checkpoint={"every": 200},
    )
    turns = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in PAIRS.items()
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"messages": pair}) + "\n" for pair in turns))
    run_ranks(run_training, 1, file)
    assert run_ranks(_answers, 1, tmp_path / "run")[0] == PAIRS
