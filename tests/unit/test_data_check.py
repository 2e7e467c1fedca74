"""The check of the data: every finding can be triggered, and none stands on clean data."""

from __future__ import annotations

import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.tiny import save_tokenizer
from unisono import cli
from unisono.config.schema import DataSection
from unisono.data.check import examine
from unisono.data.copies import sort
from unisono.data.findings import Finding, as_object
from unisono.data.job import Counts, Job
from unisono.data.order import Order
from unisono.data.prepare import Part, Prepared, prepare
from unisono.data.stats import gather
from unisono.data.store import Piece, StoreWriter
from unisono.errors import DataError

Records = list[dict[str, Any]]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("chat"))


def pair(prompt: str, completion: str) -> dict[str, str]:
    return {"prompt": prompt, "completion": completion}


def clean(count: int, tag: str) -> Records:
    return [pair(f"what is {tag} {i}?", f"it is {tag} number {i}") for i in range(count)]


def write(folder: Path, name: str, records: Records) -> str:
    path = folder / name
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return str(path)


def found(
    folder: Path, tokenizer: Path, train: Any, validation: Any = None, **settings: Any
) -> dict[tuple[str, str], Finding]:
    """Check records; gives the findings by name and set."""
    if isinstance(train, list):
        train = {"train": train}
    files: Any = {name: [write(folder, f"{name}.jsonl", records)] for name, records in train.items()}
    files = files["train"] if list(files) == ["train"] else files
    if isinstance(validation, list):
        settings["validation"] = [write(folder, "validation.jsonl", validation)]
    elif validation:
        settings["validation"] = validation
    data = DataSection(train=files, cache_dir=str(folder / "cache"), **settings)
    prepared = prepare(data, tokenizer, max_length=6000, progress=lambda line: None)
    return {
        (finding.name, finding.set): finding for finding in examine(prepared, tokenizer, progress=lambda line: None)
    }


def test_clean_data_has_no_finding(tmp_path: Path, chat: Path) -> None:
    findings = found(tmp_path, chat, clean(40, "a"), clean(25, "b"))
    assert {finding.status for finding in findings.values()} == {"ok"}
    assert all(not finding.examples and finding.hint is None for finding in findings.values())
    assert as_object(list(findings.values()))["ok"] is True
    assert {name for name, _ in findings} == {
        "duplicates", "same_prompt", "leak", "leaked_prompt", "short_answers", "few_targets", "end_markers",
        "long_samples", "left_out", "open_answers", "special_tokens", "validation_size",
    }  # fmt: skip


def test_copies_are_named_with_the_first_one(tmp_path: Path, chat: Path) -> None:
    records = clean(9, "a")
    finding = found(tmp_path, chat, [*records, records[3], records[3], records[0]])["duplicates", "train"]
    path = tmp_path / "train.jsonl"
    assert (finding.status, finding.count) == ("warn", 3)
    assert finding.examples == (
        f"{path}:10 repeats {path}:4",
        f"{path}:11 repeats {path}:4",
        f"{path}:12 repeats {path}:1",
    )


def test_copies_are_found_across_sources(tmp_path: Path, chat: Path) -> None:
    findings = found(tmp_path, chat, {"one": clean(3, "a"), "two": [*clean(1, "b"), clean(3, "a")[2]]})
    two, one = tmp_path / "two.jsonl", tmp_path / "one.jsonl"
    assert findings["duplicates", "train"].examples == (f"{two}:2 repeats {one}:3",)


def test_another_answer_to_a_prompt_is_told_once_and_copies_do_not_count(tmp_path: Path, chat: Path) -> None:
    first, other = pair("same question", "yes, it is"), pair("same question", "no, it is not")
    finding = found(tmp_path, chat, [first, other, first, *clean(5, "a")])["same_prompt", "train"]
    path = tmp_path / "train.jsonl"
    assert (finding.status, finding.count, finding.examples) == ("info", 1, (f"{path}:2 has the prompt of {path}:1",))


@pytest.mark.parametrize(("size", "status"), [(50, "fail"), (150, "warn")])
def test_leak_into_validation(tmp_path: Path, chat: Path, size: int, status: str) -> None:
    train = clean(30, "a")
    findings = found(tmp_path, chat, train, [*clean(size, "b"), train[7], pair(train[8]["prompt"], "something else")])
    leak, prompt = findings["leak", "validation"], findings["leaked_prompt", "validation"]
    names = tmp_path / "validation.jsonl", tmp_path / "train.jsonl"
    assert (leak.status, leak.count, leak.examples) == (status, 1, (f"{names[0]}:{size + 1} is also {names[1]}:8",))
    assert (prompt.status, prompt.count) == ("warn", 1)
    assert prompt.examples == (f"{names[0]}:{size + 2} has the prompt of {names[1]}:9",)


def test_a_share_by_content_has_no_leak(tmp_path: Path, chat: Path) -> None:
    findings = found(tmp_path, chat, clean(60, "a") * 2, 0.3)
    assert findings["leak", "validation"].count == 0
    assert findings["duplicates", "train"].count > 0


@pytest.mark.parametrize(("others", "status"), [(9, "warn"), (1, "info")])
def test_short_answers(tmp_path: Path, chat: Path, others: int, status: str) -> None:
    records = [pair("is it so?", "ok"), pair("is it really so?", "no"), *clean(others, "a")]
    finding = found(tmp_path, chat, records)["short_answers", "train"]
    assert (finding.status, finding.count) == (status, 2)
    assert finding.examples[0].endswith("train.jsonl:1")


def test_few_targets_and_long_samples(tmp_path: Path, chat: Path) -> None:
    findings = found(tmp_path, chat, [*clean(30, "a"), pair("p" * 5000, "an answer")])
    few, long = findings["few_targets", "train"], findings["long_samples", "train"]
    assert (few.status, few.count, long.status, long.count) == ("warn", 1, "warn", 1)
    assert few.examples == long.examples == (f"{tmp_path / 'train.jsonl'}:31",)


def test_end_markers_within_an_answer_and_special_tokens_in_a_prompt(tmp_path: Path, chat: Path) -> None:
    records = [pair("say two things", "one<eos>two and three"), pair("what is <pad>?", "padding"), *clean(5, "a")]
    findings = found(tmp_path, chat, records)
    early, special = findings["end_markers", "train"], findings["special_tokens", "train"]
    path = tmp_path / "train.jsonl"
    assert (early.status, early.examples) == ("warn", (f"{path}:1",))
    assert (special.status, special.examples) == ("warn", (f"{path}:1", f"{path}:2"))
    assert "<eos>, <pad>" in special.detail


def test_targets_all_are_not_blamed_for_the_ends_of_turns(tmp_path: Path, chat: Path) -> None:
    assert found(tmp_path, chat, clean(5, "a"), targets="all")["end_markers", "train"].count == 0


@pytest.mark.parametrize(("good", "status"), [(10, "warn"), (60, "info")])
def test_left_out_records(tmp_path: Path, chat: Path, good: int, status: str) -> None:
    finding = found(tmp_path, chat, [*clean(good, "a"), pair("p" * 7000, "x")])["left_out", "train"]
    assert (finding.status, finding.count) == (status, 1)
    assert finding.examples[0].startswith(f"{tmp_path / 'train.jsonl'}:{good + 1}: ")


def test_open_answers(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ '[U]' if m['role'] == 'user' else '[A]' }}{{ m['content'] }}"
        "{% if loop.last %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}[A]{% endif %}"
    )
    tokenizer = save_tokenizer(tmp_path / "tokenizer", chat_template=template)
    roles = ("user", "assistant", "user", "assistant")
    turns = [{"role": role, "content": f"words {i}"} for i, role in enumerate(roles)]
    finding = found(tmp_path, tokenizer, [{"messages": turns}])["open_answers", "train"]
    assert (finding.status, finding.count) == ("warn", 1)


@pytest.mark.parametrize(("size", "status"), [(None, "info"), (19, "warn"), (20, "ok")])
def test_size_of_validation(tmp_path: Path, chat: Path, size: int | None, status: str) -> None:
    validation = None if size is None else clean(size, "b")
    assert found(tmp_path, chat, clean(5, "a"), validation)["validation_size", "validation"].status == status


@pytest.mark.parametrize(("weight", "status"), [(10.0, "ok"), (10.5, "warn")])
def test_repetition_of_a_source(tmp_path: Path, chat: Path, weight: float, status: str) -> None:
    findings = found(tmp_path, chat, {"big": clean(9, "a"), "small": clean(2, "b")}, weights={"small": weight})
    assert findings["repetition", "train small"].status == status
    assert findings["repetition", "train big"].status == "ok"


def test_sorted_hashes_are_compared_across_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.data.copies._BLOCK", 2)
    hashes = np.array([b"b", b"a", b"b", b"", b"", b"b", b"a"], "S16")
    ordered = sort(hashes)
    assert ordered.repeating().tolist() == [False, False, True, False, False, True, True]
    assert ordered.repeating(np.arange(7) == 0).tolist() == [False, False, False, False, False, True, True]
    assert ordered.find(np.array([b"a", b"b", b"c"], "S16")).tolist() == [1, 0, -1]


RUN = """\
run: {output_dir: out}
model: {path: MODEL}
data: {train: [train.jsonl], validation: [validation.jsonl], cache_dir: cache}
batch: {global_size: 8}
length: {epochs: 2}
"""


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["unisono", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


@pytest.fixture
def run_file(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "train.jsonl", clean(30, "a"))
    write(tmp_path, "validation.jsonl", clean(25, "b"))
    Path("run.yaml").write_text(RUN.replace("MODEL", str(tiny)), encoding="utf-8")
    return "run.yaml"


def test_exit_codes_and_keys_of_the_command(
    run_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "data", "check", run_file) == 0
    assert "0 failed" in capsys.readouterr().out
    write(Path(), "validation.jsonl", [*clean(25, "b"), *clean(3, "a")])
    assert call(monkeypatch, "data", "check", run_file, "--json") == 1
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert sorted(report) == ["findings", "ok", "version"] and report["ok"] is False
    assert set(report["findings"][0]) == {"name", "set", "status", "count", "detail", "examples", "hint"}
    assert "preparing data" in output.err
    write(Path(), "validation.jsonl", clean(5, "b"))
    assert call(monkeypatch, "data", "check", run_file) == 0, "a warning is no failure"
    Path("train.jsonl").write_text('{"prompt": "a", "completion": \n', encoding="utf-8")
    assert call(monkeypatch, "data", "check", run_file) == 2
    assert "train.jsonl:1" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["show", "stats", "check"])
def test_max_length_above_the_context_is_refused(
    run_file: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "data", command, run_file, "data.max_length=99999") == 2
    assert "data.max_length is 99999 but the model's context is" in capsys.readouterr().err


def test_a_stream_is_prepared_to_be_looked_at(
    run_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["data.mode=stream", "length={updates: 5}"]
    assert call(monkeypatch, "data", "stats", run_file, *words, "--json") == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["run"]["updates"] == 5
    assert "data.mode is stream" in output.err


@pytest.mark.parametrize("num_samples", [50_000, pytest.param(2_000_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(300)
def test_memory_follows_the_samples(num_samples: int, tmp_path: Path, chat: Path) -> None:
    tracemalloc.start()
    try:
        prepared = synthetic(tmp_path, chat, num_samples)
        tracemalloc.reset_peak()
        findings = examine(prepared, chat, progress=lambda line: None)
        order = Order((num_samples,), global_size=64, global_tokens=None, seed=0)
        stats = gather(prepared, order, context_tokens=100, epochs=1, updates=None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert {finding.status for finding in findings} == {"ok", "info"}
    assert stats.train.samples == num_samples
    assert peak < 50e6 + 80 * num_samples  # 191 MB for two million


def synthetic(folder: Path, tokenizer: Path, num_samples: int) -> Prepared:
    """Write a store of random samples, all different, without a source file."""
    random = np.random.default_rng(0)
    with StoreWriter(folder / "train") as writer:
        for first in range(0, num_samples, 50_000):
            lengths = random.integers(24, 41, min(50_000, num_samples - first))
            ends = np.cumsum(lengths)
            ids = random.integers(0, 256, ends[-1]).astype(np.int32)
            ids[ends - 1] = 257
            places = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
            is_target = places >= np.repeat(lengths // 2, lengths)
            num_targets = lengths - lengths // 2
            writer.append(
                Piece(ids, is_target, np.column_stack([lengths, num_targets, first + np.arange(len(lengths))]))
            )
        writer.finish("key", num_samples)
    counts = Counts(records=num_samples, kept=num_samples, samples=num_samples)
    job = Job((), "auto", (), "assistant", 100, "drop", "stop", 0, 0.0, tokenizer, False)
    summary = {"counts": vars(counts), "shape": "messages", "left_out": [], "ignored": [], "num_left_out": 0}
    part = Part("train", "", job, folder, summary)
    return Prepared(part.store("train"), (num_samples,), (1.0,), {}, counts, "messages", (), (part,))


def test_a_file_that_shrank_meanwhile_is_named(tmp_path: Path, chat: Path) -> None:
    path = Path(write(tmp_path, "train.jsonl", clean(5, "a") * 2))
    data = DataSection(train=[str(path)], cache_dir=str(tmp_path / "cache"))
    prepared = prepare(data, chat, max_length=100, progress=lambda line: None)
    write(tmp_path, "train.jsonl", clean(2, "a"))
    with pytest.raises(DataError, match="changed while"):
        examine(prepared, chat, progress=lambda line: None)
