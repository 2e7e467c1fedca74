"""Files that are not what they should be, and settings that do not fit: plain words, never a stack of frames."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
import torch

from unisono.checkpoint.manifest import FORMAT, newest_sound, sum_of
from unisono.config.schema import DataSection, ModelSection, StrategySection
from unisono.data.prepare import prepare
from unisono.errors import ConfigError, DataError, ModelError, OutputError
from unisono.loss import TrainingModel
from unisono.metrics.record import cut_after
from unisono.model.facts import read_facts, sample_tokens
from unisono.model.load import load_model
from unisono.model.save import hand_over
from unisono.precision import choose as choose_precision
from unisono.strategy import choose as choose_strategy


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model, to be spoilt."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def test_a_configuration_that_is_a_list(copy: Path) -> None:
    (copy / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config.json is not an object"):
        read_facts(copy)


def test_a_sample_must_fit_the_context(tiny: Path) -> None:
    facts = read_facts(tiny)
    assert sample_tokens("auto", facts) == sample_tokens(facts.context_tokens, facts) == 4096
    with pytest.raises(ConfigError, match=r"data.max_length is 4097 but the model's context is 4096\n  hint: "):
        sample_tokens(4097, facts)


def test_weights_that_are_cut_off(copy: Path) -> None:
    weights = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ModelError, match="cannot be loaded as a causal language model"):
        load_model(ModelSection(path=str(copy)), copy, weights=torch.float32, seed=0)


def test_a_tokenizer_that_is_empty(copy: Path, tmp_path: Path) -> None:
    (copy / "tokenizer.json").write_text("{}")
    (tmp_path / "d.jsonl").write_text('{"text": "x"}\n')
    data = DataSection(train=[str(tmp_path / "d.jsonl")], cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ModelError, match="the tokenizer cannot be loaded"):
        prepare(data, copy, max_length=9)


def test_data_without_any_record_names_the_first_line(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('\n{"text": \n')
    data = DataSection(train=[str(tmp_path / "d.jsonl")], cache_dir=str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"0 samples; the first one: .*d.jsonl:2: is not valid JSON"):
        prepare(data, tiny, max_length=9)


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_one_rank_shares_nothing(name: str) -> None:
    with pytest.raises(ConfigError, match=f"strategy.name is {name}, but there is one rank"):
        choose_strategy(StrategySection(name=name), 1)  # type: ignore[arg-type]


def test_weights_in_bf16_are_computed_in_bf16(tiny: Path) -> None:
    assert choose_precision("auto", torch.device("cpu"), "bf16") == ("bf16", "auto: the weights are kept in bf16")
    causal_lm = load_model(ModelSection(path=str(tiny)), tiny, weights=torch.bfloat16, seed=0)
    TrainingModel(causal_lm, document_attention=True).verify(packed=True, device=torch.device("cpu"))


@pytest.mark.parametrize(
    "strange", [{"update": "3"}, {"files": {"x": {"bytes": 1}}}, {"files": {"x": []}}, {"files": [1]}]
)
def test_a_strange_manifest_is_passed_over(strange: dict[str, object], tmp_path: Path) -> None:
    values = {"format": FORMAT, "update": 3, "epoch": 0, "world": 1, "state": {}, "settings": {}, "files": {"x": {}}}
    values |= strange
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/manifest.json").write_bytes(orjson.dumps(values | {"sha256": sum_of(values)}))
    found, passed_over = newest_sound(tmp_path)
    assert found is None
    assert len(passed_over) == 1 and "ignored mine: its manifest" in passed_over[0]


@pytest.mark.parametrize("line", ['{"a": 1}', "[1]"])
def test_lines_of_somebody_else_are_not_cut(line: str, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{{"update": 1}}\n{line}\n')
    with pytest.raises(OutputError, match=r"metrics.jsonl:2: this is not a line of a run"):
        cut_after(file, 1)
    assert line in file.read_text()


def test_a_model_that_cannot_be_written(tiny: Path, tmp_path: Path) -> None:
    """A file in the way stands for a disk without room; nothing half-written is left."""
    causal_lm = load_model(ModelSection(path=str(tiny)), tiny, weights=torch.float32, seed=0)
    (tmp_path / "run").write_text("a file")
    with pytest.raises(OutputError, match=r"the model cannot be written: [\s\S]*hint: make room"):
        hand_over(causal_lm, tiny, tmp_path / "run/model", base="", writes=True)


def test_a_full_disk_is_told_in_plain_words(tmp_path: Path) -> None:
    """By the rank, wherever it was writing; as exit code 1, since a restart may find room."""
    (tmp_path / "full.py").write_text(
        "import errno\nfrom unisono.worker import run_worker\n\n"
        "def main():\n    raise OSError(errno.ENOSPC, 'No space left on device')\n\nrun_worker(main)\n"
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "full.py")], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: a file of the run cannot be written: No space left on device\n  hint: make")
