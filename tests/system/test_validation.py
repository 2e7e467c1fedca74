"""Validation is exact on any number of processes (B42, B43), its answers are the model's own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from support.ranks import run_ranks
from support.runs import assert_same_weights, make_run, read_lines, train_until_killed, train_whole
from support.tiny import save_tiny
from unisono.checkpoint.manifest import read

ANSWERS = {f"{letter}?": letter.lower() * count for count, letter in enumerate("ABCDEFGH", 1)}
FIVE = (3, 30, 5, 8, 60)  # tokens of a sample: B42
PROMPT, END = "<bos>user\n{}<eos>\n<bos>assistant\n", "<eos>"

pytestmark = pytest.mark.timeout(90)


def write_pairs(file: Path, pairs: dict[str, str]) -> str:
    """Write questions with their answers as conversations."""
    roles = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs.items()]
    file.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in roles), encoding="utf-8")
    return str(file)


def write_texts(file: Path, lengths: tuple[int, ...]) -> str:
    """Write plain texts of so many tokens: bytes and the end token."""
    texts = ["".join(chr(97 + (7 * k + n) % 26) for k in range(n - 1)) for n in lengths]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(file)


def lines_of(run: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in read_lines(run / "metrics.jsonl") if line.get("kind") == kind]


def plain_losses(rank: int, world: int, folder: Path, samples: list[tuple[str, str]]) -> list[tuple[float, int]]:
    """Sum the losses of each (prompt, answer) and count its targets, one by one, with plain transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for prompt, answer in samples:
        ids = tokenizer([prompt + answer], return_tensors="pt").input_ids
        skipped = max(1, len(tokenizer(prompt).input_ids))
        with torch.no_grad():
            chances = model(ids).logits[0].double().log_softmax(-1)
        targets = ids[0, skipped:]
        found.append((-float(chances[skipped - 1 : -1].gather(1, targets[:, None]).sum()), len(targets)))
    return found


def mean(sums: list[tuple[float, int]]) -> float:
    return math.fsum(loss for loss, _ in sums) / sum(count for _, count in sums)


def test_b43_named_sets_are_exact_on_any_number_of_processes(tiny: Path, tmp_path: Path) -> None:
    """Sets of 5 and 1 samples and most unequal targets: a mean over batches, ranks or sets would be another number."""
    sets = {"short": {"a": "b", "c": "dd"}, "long": {"e": "f" * 90, "g": "h", "i": "j" * 7}, "one": {"k": "l"}}
    files = {name: [write_pairs(tmp_path / f"{name}.jsonl", pairs)] for name, pairs in sets.items()}
    sections = {"data": {"validation": files}, "length": {"updates": 2}, "validate": {"every": 1}}
    found = {}
    for world in (1, 2, 3):
        said = train_whole(world, make_run(tmp_path, tiny, name=f"run{world}", **sections))
        lines = lines_of(tmp_path / f"run{world}", "validation")
        assert [(line["update"], line["name"]) for line in lines] == [
            (update, name) for update in (1, 2) for name in ("short", "long", "one", "all")
        ]
        assert "validation after update 2, long: loss " in said and "validation after update 2, all: loss " in said
        found[world] = lines
        best = read(tmp_path / f"run{world}/checkpoints/update-00000002")
        assert best.validation_loss == lines[-1]["loss"], "checkpoints compare by the loss over all targets of all sets"
        assert best.state["best_validation_loss"] == min(lines[3]["loss"], lines[7]["loss"])
    samples = {name: [(PROMPT.format(q), a + END) for q, a in pairs.items()] for name, pairs in sets.items()}
    sums = run_ranks(plain_losses, 1, tmp_path / "run1/model", [s for each in samples.values() for s in each])[0]
    expected = {"short": sums[:2], "long": sums[2:5], "one": sums[5:], "all": sums}
    assert abs(mean(sums) - math.fsum(mean(expected[name]) for name in sets) / 3) > 1e-2, "this data tells them apart"
    for world, lines in found.items():
        assert [line["num_targets"] for line in lines[4:]] == [5, 101, 2, 108]
        for line in lines[4:]:
            assert line["loss"] == pytest.approx(mean(expected[line["name"]]), abs=1e-5), (world, line)


def test_b42_sharded_ranks_with_unequal_numbers_of_batches(tiny: Path, tmp_path: Path) -> None:
    """One sample a micro-batch: one rank has the long one, the other four; the forward is collective."""
    files = [write_texts(tmp_path / "held.jsonl", FIVE)]
    file = make_run(
        tmp_path,
        tiny,
        data={"validation": files, "train": [write_texts(tmp_path / "train.jsonl", (9, 4, 6, 7))]},
        batch={"micro_size": 1},
        strategy={"name": "fsdp2"},
        length={"updates": 1},
    )
    train_whole(2, file)
    texts = [("", json.loads(line)["text"] + END) for line in Path(files[0]).read_text().splitlines()]
    sums = run_ranks(plain_losses, 1, tmp_path / "run/model", texts)[0]
    (line,) = lines_of(tmp_path / "run", "validation")
    assert "name" not in line
    assert [count + 1 for _, count in sums] == list(FIVE) and line["num_targets"] == sum(FIVE) - len(FIVE)
    assert line["loss"] == pytest.approx(mean(sums), abs=1e-5)


def plain_answers(rank: int, world: int, folder: Path, questions: list[str], limits: list[int]) -> list[str]:
    """Answer greedily with plain transformers, the whole sequence anew for every token."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = []
    for question, limit in zip(questions, limits, strict=True):
        prompt = tokenizer(PROMPT.format(question)).input_ids
        ids = list(prompt)
        while len(ids) < len(prompt) + limit and (len(ids) == len(prompt) or ids[-1] != 257):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        answers.append(tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True))
    return answers


def test_answers_are_those_of_the_final_model(tmp_path: Path) -> None:
    """A model that knows its eight answers is right about them, wrong about others, and cut where its context ends."""
    base = save_tiny(tmp_path / "base", max_position_embeddings=40, pad_is_eos=True)
    new = {"Z?": "zz", "AB?": "ab"}
    long = f"{'x' * 17}?"  # 37 tokens with the template
    train = write_pairs(tmp_path / "train.jsonl", ANSWERS)
    seen = write_pairs(tmp_path / "seen.jsonl", dict(list(ANSWERS.items())[:5]))
    unseen = write_pairs(tmp_path / "unseen.jsonl", new | {long: "y"})
    file = make_run(
        tmp_path,
        base,
        data={"train": [train], "validation": {"seen": [seen], "unseen": [unseen]}},
        batch={"global_size": 8},
        optim={"warmup": 10},
        length={"updates": 160},
        checkpoint={"every": 160},
        validate={"every": 80, "generate": 3, "max_new_tokens": 15},
    )
    said = train_whole(1, file)
    asked = [*list(ANSWERS)[:3], *new, long]
    plain = run_ranks(plain_answers, 1, tmp_path / "run/model", asked, [15] * 5 + [3])[0]
    assert len(plain[-1]) == 3, "this answer would have gone on: choose another seed"
    answers = read_lines(tmp_path / "run/generations/update-00000160.jsonl")
    assert [each["set"] for each in answers] == ["seen"] * 3 + ["unseen"] * 3
    assert [each["record"] for each in answers] == [0, 1, 2, 0, 1, 2]
    assert [each["prompt"] for each in answers] == [PROMPT.format(question) for question in asked]
    assert [each["answer"] for each in answers] == plain
    assert [each["expected"] for each in answers] == ["a", "bb", "ccc", "zz", "ab", "y"]
    assert [each["is_exact"] for each in answers] == [True] * 3 + [False] * 3
    assert lines_of(tmp_path / "run", "generation")[2:] == [
        {"kind": "generation", "update": 160, "name": "seen", "exact_match": 1.0, "num_samples": 3},
        {"kind": "generation", "update": 160, "name": "unseen", "exact_match": 0.0, "num_samples": 3},
    ]
    assert "answers after update 160, seen: 3 of 3 exactly right (100.0%)" in said and "-> bb  (right)" in said
    assert said.count("validate.max_new_tokens is 15, but after 1 of 6 prompts the model's context of 40 tokens") == 1
    (summary,) = lines_of(tmp_path / "run", "summary")
    assert (summary["num_updates"], summary["update"]) == (160, 160) and 0 <= summary["data_wait_share"] < 1
    assert {"data", "forward", "backward", "exchange", "optimizer", "other"} == summary["seconds_by_cause"].keys()
    assert f"waited {summary['data_wait_share']:.1%} of the time for data" in said


def test_answering_leaves_training_bitwise_as_it_is(tiny: Path, tmp_path: Path) -> None:
    """Adapters with dropout and recomputed activations; 5 samples on 2 ranks; one run is killed and goes on."""
    sections: dict[str, Any] = {
        "model": {"lora": {"rank": 4, "alpha": 8.0, "dropout": 0.1}, "activation_checkpointing": True},
        "data": {"validation": {"a": [write_pairs(tmp_path / "a.jsonl", dict(list(ANSWERS.items())[:3]))]}},
        "length": {"updates": 4},
        "validate": {"every": 1},
    }
    sections["data"]["validation"]["b"] = [write_pairs(tmp_path / "b.jsonl", {"x": "y", "z": "w"})]
    silent = make_run(tmp_path, tiny, name="silent", **sections)
    sections["validate"] |= {"generate": 4, "max_new_tokens": 6}
    asked = make_run(tmp_path, tiny, name="asked", **sections)
    train_whole(2, silent)
    train_until_killed(2, asked, 4)
    run = tmp_path / "asked"
    before = {file.name: file.read_bytes() for file in (run / "generations").iterdir()}
    assert sorted(before) == [f"update-{update:08d}.jsonl" for update in (1, 2, 3)]
    (run / "generations/update-00000001.jsonl").unlink()  # of an update that is done: not made again
    (run / "generations/update-00000009.jsonl").write_text("{}")  # of a later one, by a session that had other plans
    assert "resumed update-00000002" in train_whole(2, asked)
    assert_same_weights(run, tmp_path / "silent")
    after = {file.name: file.read_bytes() for file in (run / "generations").iterdir()}
    assert sorted(after) == [f"update-{update:08d}.jsonl" for update in (2, 3, 4)]
    assert all(after[name] == before[name] for name in sorted(after)[:2])
    answers = read_lines(run / "generations/update-00000004.jsonl")
    assert [(each["set"], each["record"]) for each in answers] == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1)]
    assert [line["num_samples"] for line in lines_of(run, "generation")] == [3, 2] * 4
    assert [line["num_updates"] for line in lines_of(run, "summary")] == [2], "of the session that went on"
    for ours, theirs in zip(lines_of(run, "validation"), lines_of(tmp_path / "silent", "validation"), strict=True):
        assert ours == theirs
