"""The statistics of the data: counted right, for one source and several, with and without a share for validation."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.tiny import save_tokenizer
from unisono import cli
from unisono.config.schema import DataSection
from unisono.data.describe import describe
from unisono.data.lengths import Lengths, lines_of
from unisono.data.order import Order
from unisono.data.prepare import prepare
from unisono.data.stats import Stats, gather


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without a chat template a prompt/completion record has exactly its characters + 1 tokens."""
    return save_tokenizer(tmp_path_factory.mktemp("plain"), chat_template=None)


def write(folder: Path, name: str, *records: dict[str, Any]) -> str:
    (folder / name).write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return str(folder / name)


def pair(prompt: int, completion: int, **more: str) -> dict[str, str]:
    return {"prompt": "p" * prompt, "completion": "c" * completion, **more}


def stats_of(folder: Path, tokenizer: Path, *, epochs: int | None = 2, **section: Any) -> Stats:
    data = DataSection(cache_dir=str(folder / "cache"), **section)
    prepared = prepare(data, tokenizer, max_length=20, progress=lambda line: None)
    order = Order(prepared.sizes, weights=prepared.weights, global_size=2, global_tokens=None, seed=0)
    updates = None if epochs else 3
    return gather(prepared, order, context_tokens=4096, epochs=epochs, updates=updates)


def test_one_source_is_counted(tmp_path: Path, plain: Path) -> None:
    path = write(tmp_path, "a.jsonl", pair(1, 2, id="7"), pair(3, 4), pair(9, 9), pair(30, 1), {"prompt": "p"})
    stats = stats_of(tmp_path, plain, train=[path], on_error="skip")
    train = stats.train
    assert (train.records, train.kept, train.dropped_overlong, train.skipped_bad) == (5, 3, 1, 1)
    assert (train.samples, train.tokens, train.targets) == (3, 4 + 8 + 19, 3 + 5 + 10)
    assert train.targets_share == 18 / 31 and train.context_share == pytest.approx(31 / 3 / 20)
    assert (train.lengths.shortest, train.lengths.median, train.lengths.longest) == (4, 8, 19)
    assert sum(one.samples for one in train.lengths.histogram) == 3
    assert (train.ignored_fields, train.formats, train.files) == (["id"], ["prompt_completion"], 1)
    assert train.store_bytes >= 31 * 5 + 3 * 32 and Path(train.left_out_files[0]).is_file()
    assert (stats.epoch.updates, stats.run.updates, stats.run.epochs, stats.run.tokens) == (2, 4, 2, 62)
    text = "\n".join(describe(stats))
    assert "1 records dropped: longer than data.max_length" in text and "fields that play no part: id" in text


def test_weights_make_the_mix(tmp_path: Path, plain: Path) -> None:
    big = write(tmp_path, "big.jsonl", *(pair(i, 1) for i in range(1, 9)))
    small = write(tmp_path, "small.jsonl", pair(9, 9), pair(8, 10))
    stats = stats_of(tmp_path, plain, train={"big": [big], "small": [small]}, weights={"big": 0.5, "small": 3.0})
    mix = {source.name: source for source in stats.mix}
    assert (mix["big"].samples, mix["small"].samples) == (4.0, 6.0)
    assert (mix["small"].samples_share, mix["small"].tokens) == (0.6, 3 * 38)
    assert sum(source.tokens_share for source in stats.mix) == pytest.approx(1)
    assert (stats.epoch.samples, stats.epoch.updates) == (10, 5)
    assert [source.samples for source in stats.sources] == [8, 2] and stats.train.samples == 10
    lines = describe(stats)
    assert any(line.startswith("train, all") for line in lines) and any("60.0%" in line for line in lines)


def test_a_share_for_validation_adds_up(tmp_path: Path, plain: Path) -> None:
    records = [{"prompt": f"p{i}", "completion": "c"} for i in range(40)]
    stats = stats_of(tmp_path, plain, train=[write(tmp_path, "a.jsonl", *records)], validation=0.4, epochs=None)
    train, validation = stats.train, stats.validation[0]
    assert train.kept + train.to_validation == train.records == 40
    assert validation.records == validation.kept == validation.samples == train.to_validation > 0
    assert train.samples == train.kept
    assert (stats.run.updates, stats.run.epochs) == (3, 3 / stats.epoch.updates)


@settings(max_examples=40)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=30))
def test_lengths_are_numpys(lengths: list[int]) -> None:
    counted = Lengths(np.bincount(lengths))
    for percent in (0, 50, 95, 100):
        assert counted.percentile(percent) == pytest.approx(np.percentile(lengths, percent))
    assert (counted.num_samples, counted.num_tokens) == (len(lengths), sum(lengths))
    assert (counted.shortest, counted.longest) == (min(lengths), max(lengths))
    bins = counted.bins()
    assert [one.samples for one in bins] == [sum(one.begin <= n < one.end for n in lengths) for one in bins]
    assert sum(one.samples for one in bins) == len(lengths)
    assert len(lines_of(counted.summary())) == len(bins) + 1


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["unisono", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def test_json_of_show_and_stats(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "train.jsonl", {"prompt": "one and one?", "completion": "two"}, pair(3, 4))
    Path("run.yaml").write_text(
        f"run: {{output_dir: out}}\nmodel: {{path: {tiny}}}\ndata: {{train: [train.jsonl], cache_dir: cache}}\n"
        "batch: {global_tokens: 64}\nlength: {epochs: 1}\n",
        encoding="utf-8",
    )
    assert call(monkeypatch, "data", "stats", "run.yaml", "--json") == 0
    stats = json.loads(capsys.readouterr().out)
    assert list(stats) == [
        "version", "context_tokens", "max_length", "train", "sources", "validation", "mix", "epoch", "run",
    ]  # fmt: skip
    assert set(stats["epoch"]) == {"samples", "tokens", "updates", "samples_per_update", "tokens_per_update"}
    assert call(monkeypatch, "data", "show", "run.yaml", "--json", "-n", "1") == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(shown) == {"version", "samples", "lengths", "messages"} and len(shown["samples"]) == 1
    sample = shown["samples"][0]
    assert [run["text"] for run in sample["runs"] if run["is_target"]] == ["two<eos>"]
    assert sample["tokens"] == len(sample["ids"]) == sample["runs"][-1]["end"]
    assert sample["targets"] == sum(run["end"] - run["begin"] for run in sample["runs"] if run["is_target"])


def test_everything_in_the_statistics_can_be_written(tmp_path: Path, plain: Path) -> None:
    stats = stats_of(tmp_path, plain, train=[write(tmp_path, "a.jsonl", pair(1, 2))])
    assert json.loads(json.dumps(asdict(stats)))["train"]["samples"] == 1
