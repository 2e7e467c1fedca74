"""`unisono bench`: its figures are functions of what a run wrote; the whole of it on real ranks of a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.ranks import run_ranks
from support.runs import make_run, run_training
from support.tiny import save_tiny
from unisono.bench import run as bench_run
from unisono.bench.measure import Row, flops_per_second, related, row_of, table
from unisono.bench.plot import svg
from unisono.bench.run import bench, parse_ranks
from unisono.config.load import load
from unisono.drill.scratch import Outcome, Scratch
from unisono.errors import ConfigError


def row(ranks: int, speed: float) -> Row:
    return Row(ranks, 2.0, speed, 2048, 2**30, communication=0.12, waiting=0.0, data=0.031, mfu=0.4)


def test_the_figures_of_a_run() -> None:
    """The first two updates warm up; medians stand, and shares of all ranks' time."""
    seconds = {1: 50.0, 2: 9.0, 3: 2.0, 4: 4.0, 5: 2.0}
    updates = {
        u: {"seconds": s, "tokens_per_second": 100 / s, "num_tokens": 100, "num_targets": 10}
        for u, s in seconds.items()
    }
    spans = {"communication": 0.5, "waiting": 0.0, "data": 0.25}
    events = [
        {"update": u, "seconds": 5.0, "spans": spans if u > 2 else {}, "micro_batch_tokens": tokens}
        for u, tokens in ((1, 30), (2, 70), (3, 50), (3, 20), (4, 50), (5, 50))
    ]
    found = row_of(2, updates, events, {"peak_memory_bytes": 7})
    shares = {"communication": pytest.approx(0.1), "waiting": 0.0, "data": pytest.approx(0.05)}
    assert found == Row(2, 0.5, 50.0, 70, 7, **shares)
    ids = {u: [1, 2, 3, 4] for u in seconds}
    speed = flops_per_second(updates, ids, lambda samples, tokens, targets: samples * tokens * targets)
    assert speed == pytest.approx(4 * 100 * 10 / 2.0)


def test_speed_up_and_efficiency_are_of_the_first_row() -> None:
    one, two, four = related([row(1, 100.0), row(2, 190.0), row(4, 300.0)])
    assert (one.speed_up, two.speed_up, four.speed_up) == (1.0, 1.9, 3.0)
    assert (one.efficiency, two.efficiency, four.efficiency) == (1.0, 0.95, 0.75)
    assert related([row(2, 100.0), row(4, 200.0)])[1].efficiency == 1.0 and related([]) == []
    lines = table([one, two])
    assert len({len(line) for line in lines}) == 1
    cells = [cell.strip() for cell in lines[-1].strip("|").split("|")]
    assert cells == ["2", "2,048 tokens", "2", "190", "1.00", "1.90", "95%", "12.0%", "0.0%", "3.1%", "40.0%"]


@settings(max_examples=30, deadline=None)
@given(
    speeds=st.lists(st.floats(1e-3, 1e9), min_size=1, max_size=6),
    first=st.integers(1, 64),
    title=st.text(st.characters(codec="utf-8", exclude_categories=["C"])),
)
def test_the_plot_is_a_picture_whatever_the_figures(speeds: list[float], first: int, title: str) -> None:
    """Every measured point lies inside of it, and the title is shown as it is."""
    rows = related([row(first * 2**power, speed) for power, speed in enumerate(speeds)])
    picture = ElementTree.fromstring(svg(rows, title))
    points = [node for node in picture.iter() if node.tag.endswith("circle")]
    assert len(points) == len(rows)
    for point in points:
        assert 0 <= float(point.attrib["cx"]) <= 640 and 0 <= float(point.attrib["cy"]) <= 400
    assert title in [node.text or "" for node in picture.iter() if node.tag.endswith("text")]


@pytest.mark.parametrize("text", ["", "0", "1,1", "1,,2", "two", "-1", "1.5"])
def test_what_is_no_list_of_ranks_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--ranks is"):
        parse_ranks(text)
    assert parse_ranks("1, 2,4") == [1, 2, 4]


def in_ranks_of_ours(self: Scratch, name: str, settings: dict[str, Any]) -> Outcome:
    """Run without the launcher, whose ranks would import everything anew."""
    overrides = {**self._fixed(self.folder / name), **settings}
    texts = tuple(
        f"{key}={value if isinstance(value, Path) else json.dumps(value)}" for key, value in overrides.items()
    )
    run_ranks(run_training, settings["launch.ranks"], self._loaded.path, texts)
    return Outcome(self.folder / name, 0 if settings["launch.ranks"] < 3 else 1, [])


@pytest.mark.timeout(60)
def test_a_real_run_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scratch, "run", in_ranks_of_ours)
    peaks = iter((1e11, 1e12))  # something else ran beside the first
    monkeypatch.setattr(bench_run, "_peak_flops", lambda compute: {"fp32": next(peaks)}[compute])
    file = make_run(
        tmp_path,
        save_tiny(tmp_path / "model"),
        data={"validation": 0.1},
        log={"profile": "2..9"},
        length={"updates": 9},
    )
    said: list[str] = []
    assert bench(load(file), [], [1, 2, 3], 5, tmp_path / "out", said.append) == 1
    assert said[-1] == "3 ranks: the run failed, see above"
    result = json.loads((tmp_path / "out/bench.json").read_text())
    one, two = result["rows"]
    assert (one["ranks"], two["ranks"], one["speed_up"]) == (1, 2, 1.0)
    assert two["speed_up"] == pytest.approx(two["tokens_per_second"] / one["tokens_per_second"])
    assert two["efficiency"] == pytest.approx(two["speed_up"] / 2)
    assert one["communication"] == one["waiting"] == 0 < two["communication"] < 1
    assert one["micro_batch_tokens"] > two["micro_batch_tokens"] > 0 and one["memory_bytes"] > 2**20
    assert 0 < one["mfu"] < 0.1, "a tiny model on a device of 1 TFLOP/s"
    assert (tmp_path / "out/bench.svg").read_text().startswith("<svg")
    assert sum(line.startswith("|") for line in said) == 4
    assert not list(tmp_path.glob(".unisono-drill-*")) and not (tmp_path / "run").exists()
