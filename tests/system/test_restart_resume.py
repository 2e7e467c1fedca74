"""A restart goes on from what the launch itself has saved, whatever ``checkpoint.resume`` says (never, or a folder)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.launching import MODULES, fake_config
from unisono.checkpoint.manifest import Manifest, seal
from unisono.config.load import Loaded
from unisono.config.schema import RunConfig
from unisono.launch import run


def save(folder: Path, update: int) -> Path:
    """Write something that is a checkpoint as far as its manifest goes."""
    target = folder / "checkpoints" / f"update-{update:08d}"
    target.mkdir(parents=True)
    (target / "data").write_bytes(b"x")
    seal(target, Manifest(update, 0, 1, {}, {}))
    return target


@pytest.mark.parametrize(("earlier", "resume"), [(False, "never"), (True, "a folder")])
def test_a_restart_resumes_its_own_checkpoints_only(
    earlier: bool, resume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", MODULES)
    output = tmp_path / "run"
    if earlier:
        save(output, 7)
    saved = save(tmp_path / "other", 2)
    config = fake_config(ranks=1, restarts=1)
    values = config.model_dump(by_alias=True)
    values["run"]["output_dir"], values["checkpoint"]["resume"] = str(output), resume
    config = RunConfig.model_validate(values)
    plan = f"0:copy:{saved}>{output}/checkpoints/update-00000002 0:fail_once:{tmp_path}/marker 0:note:{tmp_path}"
    loaded = Loaded(config, {}, Path("run.yaml"))
    assert run(loaded, plan.split(), module="support.fake_worker", prepare=lambda config: None) == 0
    arguments = json.loads((tmp_path / "rank0.json").read_text())["arguments"]
    assert arguments[-1] == f"checkpoint.resume={output}/checkpoints/update-00000002"
