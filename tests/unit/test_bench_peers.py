"""The table of peers: a fast wrong loss does not count, a failure is told, and an interruption loses nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PEERS = Path(__file__).parents[2] / "benchmarks/peers"
SETTINGS: dict[str, object] = {"updates": 3, "warmup": 1}
NAMES = ("cell", "contestants", "job", "machine", "trial", "results", "table")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """Give the scripts' modules, as they import one another when run from their folder; forgotten afterwards."""
    monkeypatch.syspath_prepend(str(PEERS))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield {name: importlib.import_module(name) for name in NAMES}
    for name in NAMES:
        sys.modules.pop(name, None)


def trial(peers: dict[str, ModuleType], name: str, speed: int = 100, loss: float = 1.0, **more: Any) -> Any:
    values = {
        "cell": "bf16/full/2/16/gsm8k",
        "contestant": name,
        "round": 1,
        "settings": SETTINGS,
        "load": 0.5,
        "seconds": [9.0, 1.0, 1.0],
        "tokens": [speed] * 3,
        "loss": loss,
        "peak_bytes": 2**30,
    }
    return peers["trial"].Trial(**{**values, **more})


def measured(peers: dict[str, ModuleType], path: Path) -> Any:
    results = peers["results"].Results(path, SETTINGS)
    results.add(trial(peers, "reference", cell="bf16/full/1/16/gsm8k", loss=1.0, loss_before=2.0))
    return results


def test_a_fast_wrong_loss_is_marked_and_does_not_count(peers: dict[str, ModuleType], tmp_path: Path) -> None:
    results = measured(peers, tmp_path / "results.jsonl")
    results.add(trial(peers, "tutorial", 100, loss=1.09))  # less than a tenth of what the reference has learnt
    results.add(trial(peers, "fabric", 300, loss=1.11, peak_bytes=2**29))
    results.add(trial(peers, "trl-packed", 300, loss=float("nan")))
    results.add(trial(peers, "unisono", 200))
    lines = peers["table"].cell_table(results, peers["cell"].parse("bf16/full/2/16"))
    row = {name: next(line for line in lines if text in line) for name, text in WORDS.items()}
    assert "wrong loss" in row["fabric"] and "wrong loss" in row["packed"]
    assert "wrong" not in row["tutorial"] + row["unisono"]
    assert "| 200.0 | 200.0-200.0 | 2.00 | 1.00 | 1.00 |" in row["unisono"], "compared with the tutorial alone"


WORDS = {
    "tutorial": "the loop of a tutorial",
    "fabric": "Fabric",
    "packed": "SFTTrainer, packed",
    "unisono": "unisono, its defaults",
}


def test_what_does_not_run_is_in_the_table_with_the_reason(peers: dict[str, ModuleType], tmp_path: Path) -> None:
    results = measured(peers, tmp_path / "results.jsonl")
    results.add(trial(peers, "fabric", failure="ImportError: no | pipe", seconds=[], tokens=[]))
    lines = peers["table"].cell_table(results, peers["cell"].parse("bf16/full/2/16"))
    assert any("does not run: ImportError: no \\| pipe" in line for line in lines)


def test_an_interrupted_table_goes_on_where_it_stopped(peers: dict[str, ModuleType], tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    measured(peers, path).add(trial(peers, "tutorial"))
    with path.open("a") as file:
        file.write('{"cell": "bf16/full/2/16/gsm8k", "contest')  # the machine stopped here
    again = peers["results"].Results(path, SETTINGS)
    cell = peers["cell"].parse("bf16/full/2/16")
    assert again.has(cell, "tutorial", 1)
    assert not again.has(cell, "tutorial", 2)
    assert not again.has(cell, "unisono", 1)
    again.add(trial(peers, "unisono"))
    assert len(peers["results"].Results(path, SETTINGS).trials) == 3
    other = peers["results"].Results(path, {**SETTINGS, "updates": 9})
    assert not other.has(cell, "tutorial", 1), "measured with other settings"


def test_a_failure_is_not_tried_again_in_later_rounds(peers: dict[str, ModuleType], tmp_path: Path) -> None:
    results = measured(peers, tmp_path / "results.jsonl")
    results.add(trial(peers, "fabric", failure="ImportError: x"))
    assert results.has(peers["cell"].parse("bf16/full/2/16"), "fabric", 2)


@pytest.mark.parametrize("text", ["bf16", "bf16/full/2", "fp8/full/2/16", "bf16/full/two/16", "bf16/full/2/16/alpaca"])
def test_a_cell_that_is_none_is_refused(peers: dict[str, ModuleType], text: str) -> None:
    with pytest.raises(SystemExit, match="is no cell"):
        peers["cell"].parse(text)
