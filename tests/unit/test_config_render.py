"""The resolved run file: read back it is equal, and every value shows its origin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.runfile import write_run
from unisono.config.load import load
from unisono.config.render import json_schema, render
from unisono.config.schema import RunConfig

NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=30)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_value_is_shown_with_its_origin() -> None:
    loaded = load(write_run(Path()), ["model.lora.rank=8", "optim.warmup=3", "validate.every=2"])
    lines = {line.split(":")[0]: line for line in render(loaded).splitlines()}
    assert lines["  lr"].split("  # ") == ["  lr: 2.0e-05".ljust(lines["  lr"].index("  # ")), "run.yaml:11"]
    assert lines["    rank"].endswith("# command line")
    assert lines["    alpha"].endswith("# default")
    assert lines["validate"] == "validate:"
    assert all("  # " in line for line in lines.values() if not line.rstrip().endswith(":"))


def test_without_lora_it_says_null() -> None:
    assert "  lora: null " in render(load(write_run(Path())))


@given(name=NAMES, env=st.dictionaries(st.from_regex(r"[A-Z_]{1,8}", fullmatch=True), NAMES, max_size=3))
def test_reading_it_back_gives_an_equal_config(name: str, env: dict[str, str]) -> None:
    loaded = load(write_run(Path()))
    config = loaded.config.model_copy(
        update={
            "run": loaded.config.run.model_copy(update={"name": name}),
            "launch": loaded.config.launch.model_copy(update={"env": env}),
        }
    )
    text = render(type(loaded)(config, loaded.origins, loaded.path))
    Path("again.yaml").write_text(text, encoding="utf-8")
    assert load(Path("again.yaml")).config == config


@pytest.mark.parametrize(
    "override",
    [
        "run.name=no", "run.name=1e-5", "run.name=2001-01-01", "run.name=null", "run.name=a: b # c",
        "optim.lr=1", "optim.lr=1e-30", "optim.lr=1e22", "optim.betas=[0, 0.5]", "optim.max_grad_norm=null",
        "data.validation=[a.jsonl, 'b c.jsonl']", "data.validation=0.25", "model.lora={targets: [q, v]}",
        "optim.warmup=1", "run.seed=9223372036854775807", "log.trackers=[tensorboard]",
    ],
)  # fmt: skip
def test_special_values_survive(override: str) -> None:
    loaded = load(write_run(Path()), [override])
    Path("again.yaml").write_text(render(loaded), encoding="utf-8")
    assert load(Path("again.yaml")).config == loaded.config


def test_schema_is_closed_and_knows_every_section() -> None:
    schema = json.loads(json_schema())
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == {field.alias or name for name, field in RunConfig.model_fields.items()}
    assert "validate" in schema["properties"]
    assert schema["required"] == ["run", "model", "data", "batch", "length"]
