"""The demo's data: written by its script byte for byte, and validation requests that training never shows."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo"


@pytest.fixture(scope="module")
def make_data() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_data", DEMO / "make_data.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def records(name: str) -> list[list[dict[str, str]]]:
    lines = (DEMO / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines]


def test_the_script_writes_the_committed_files_byte_for_byte(make_data: ModuleType, tmp_path: Path) -> None:
    make_data.write(tmp_path, say=lambda text: None)
    for name in ("train.jsonl", "validation.jsonl"):
        assert (tmp_path / name).read_bytes() == (DEMO / name).read_bytes(), f"run {DEMO / 'make_data.py'}"


@pytest.mark.parametrize(("name", "number"), [("train.jsonl", 1500), ("validation.jsonl", 160)])
def test_every_request_is_another_and_every_intent_has_its_share(name: str, number: int) -> None:
    found = records(name)
    assert len(found) == number
    assert len({messages[1]["content"] for messages in found}) == number
    commands = Counter(json.loads(messages[2]["content"])["do"] for messages in found)
    assert len(commands) == 8
    assert max(commands.values()) - min(commands.values()) <= 1


def test_every_value_of_a_command_stands_in_its_request() -> None:
    for _, request, command in records("train.jsonl") + records("validation.jsonl"):
        values = list(json.loads(command["content"]).values())[1:]
        assert values
        assert all(str(value).lower() in request["content"].lower() for value in values), request["content"]


def test_validation_wordings_are_not_in_training(make_data: ModuleType) -> None:
    trained = {wording for wordings in make_data.TRAIN.values() for wording in wordings}
    held_out = {wording for wordings in make_data.HELD_OUT.values() for wording in wordings}
    assert len(held_out) == 32
    assert not {w.strip("~").lower() for w in trained} & {w.strip("~").lower() for w in held_out}
    assert not {m[1]["content"].lower() for m in records("train.jsonl")} & {
        m[1]["content"].lower() for m in records("validation.jsonl")
    }


def test_some_validation_values_are_new_too(make_data: ModuleType) -> None:
    new = {value for _, unseen in make_data.VALUES.values() for value in unseen}
    train = " ".join(m[1]["content"] for m in records("train.jsonl")).lower()
    assert not [value for value in new if value.lower() in train.split()]
    with_new = [m for m in records("validation.jsonl") if new & set(json.loads(m[2]["content"]).values())]
    assert len(with_new) >= 20
