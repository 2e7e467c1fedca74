"""Handing the model over: equal logits in plain transformers, exact merges, whole folders or none (B12)."""

from __future__ import annotations

import errno
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from support.adapter import save_adapter
from support.tiny import save_tiny
from unisono.errors import ModelError, OutputError
from unisono.export import export as module
from unisono.export.export import export

PROMPT = [[256, 104, 101, 108, 108, 111, 33, 257]]


def logits(folder: Path | str, adapter: Path | None = None) -> Any:
    """What plain transformers (and peft, for an adapter) makes of a folder."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    if adapter is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
            model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(torch.tensor(PROMPT)).logits.float()


def weights(folder: Path, name: str = "model.safetensors") -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / name)


@pytest.fixture
def full_run(tiny: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny, tmp_path / "run" / "model")
    return tmp_path / "run"


@pytest.fixture(scope="module")
def adapter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(tiny, tmp_path_factory.mktemp("adapter_run") / "model")


def test_a_full_model_is_loaded_by_plain_transformers_with_equal_logits(full_run: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoTokenizer

    export(full_run, tmp_path / "new" / "out")
    out = tmp_path / "new" / "out"
    assert torch.equal(logits(out), logits(full_run / "model"))
    assert {p.name for p in out.iterdir()} == {p.name for p in (full_run / "model").iterdir()}
    assert AutoTokenizer.from_pretrained(out).chat_template
    assert [p.name for p in out.parent.iterdir()] == ["out"]


def test_the_model_folder_itself_is_taken_too(full_run: Path, tmp_path: Path) -> None:
    export(full_run / "model", tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize(("dtype", "name"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")])
def test_weights_are_cast_once_and_loaded_as_such(full_run: Path, tmp_path: Path, dtype: str, name: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    export(full_run, tmp_path / "out", dtype=dtype)
    kind = getattr(torch, name)
    trained, cast = weights(full_run / "model"), weights(tmp_path / "out")
    assert trained.keys() == cast.keys()
    assert all(torch.equal(cast[key], value.to(kind)) for key, value in trained.items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == kind


def test_a_model_in_several_files_is_cast_with_its_index(tiny: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "run" / "model"
    AutoModelForCausalLM.from_pretrained(tiny).save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    export(tmp_path / "run", tmp_path / "out", dtype="bf16")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    cast: dict[str, Any] = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        cast |= weights(path.parent, path.name)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in cast.values())
    trained = weights(tiny)
    assert trained.keys() == cast.keys()
    assert all(torch.equal(cast[name], value.bfloat16()) for name, value in trained.items())
    assert logits(tmp_path / "out").isfinite().all()


def test_a_value_that_the_format_cannot_hold_is_refused(full_run: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = weights(full_run / "model")
    tensors["model.norm.weight"][3] = 70000.0
    save_file(tensors, full_run / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"7e\+04 in model\.norm\.weight is too large for fp16"):
        export(full_run, tmp_path / "out", dtype="fp16")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_b12_merged_in_fp32_equals_base_with_adapter(
    tiny: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(adapter.parent, tmp_path / "out", merge=True)
    unmerged = logits(tiny, adapter)
    assert (logits(tmp_path / "out") - unmerged).abs().max() < 1e-5
    assert (logits(tiny) - unmerged).abs().max() > 0.1, "the adapter changes nothing: the test is blind"
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    assert "largest relative error of a weight matrix 0 in fp32" in capsys.readouterr().out


def test_b12_a_change_smaller_than_half_a_bf16_step_survives_the_merge(tmp_path: Path) -> None:
    """Base weight 1.0 kept in bf16, adapter's delta 0.003: added in bf16 it would be gone."""
    import torch
    from safetensors.torch import load_file, save_file

    base = save_tiny(tmp_path / "base")
    tensors = {name: value.to(torch.bfloat16) for name, value in weights(base).items()}
    name = "model.layers.0.self_attn.q_proj"
    tensors[f"{name}.weight"].fill_(1.0)
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    adapter = save_adapter(base, tmp_path / "run" / "model", targets=["q_proj"])
    product = load_file(adapter / "adapter_model.safetensors")
    for key, value in product.items():  # alpha / r = 2, so that A of 1/4 * 4 ranks and B of 0.0015 make 0.003
        filled = torch.zeros(value.shape)
        if "layers.0.self_attn.q_proj" in key:
            filled.fill_(0.25 if "lora_A" in key else 0.0015)
        product[key] = filled
    save_file(product, adapter / "adapter_model.safetensors", {"format": "pt"})
    export(tmp_path / "run", tmp_path / "out", merge=True)
    merged = weights(tmp_path / "out")[f"{name}.weight"]
    assert merged.dtype == torch.float32
    assert torch.allclose(merged, torch.tensor(1.003), atol=1e-6)
    assert (torch.tensor(1.0, dtype=torch.bfloat16) + torch.tensor(0.003, dtype=torch.bfloat16)).item() == 1.0


def test_b12_a_cast_after_the_merge_reports_what_it_lost(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    export(adapter.parent, tmp_path / "exact", merge=True)
    capsys.readouterr()
    export(adapter.parent, tmp_path / "out", merge=True, dtype="bf16")
    said = capsys.readouterr().out
    exact, cast = weights(tmp_path / "exact"), weights(tmp_path / "out")
    assert all(torch.equal(cast[name], value.bfloat16()) for name, value in exact.items())
    linear = [name for name in exact if "proj" in name]
    worst = max(float((cast[n].float() - exact[n]).norm() / exact[n].norm()) for n in linear)
    assert f"largest relative error of a weight matrix in bf16 {worst:.1e}" in said


def test_b12_a_second_merge_is_an_error(adapter: Path, full_run: Path, tmp_path: Path) -> None:
    export(adapter.parent, tmp_path / "merged", merge=True)
    for run in (tmp_path / "merged", full_run):
        with pytest.raises(ModelError, match="no adapter to merge"):
            export(run, tmp_path / "again", merge=True)
    assert not (tmp_path / "again").exists()


@pytest.mark.filterwarnings("ignore::UserWarning")  # peft warns, and goes on
def test_an_adapter_on_a_tied_head_is_not_merged(tiny_tied: Path, tmp_path: Path) -> None:
    """Merged, it would change the embedding too."""
    save_adapter(tiny_tied, tmp_path / "run" / "model", targets=["lm_head"])
    with pytest.raises(ModelError, match="merged model answers differently"):
        export(tmp_path / "run", tmp_path / "out", merge=True)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_an_adapter_is_handed_over_for_peft(tiny: Path, adapter: Path, tmp_path: Path) -> None:
    import torch

    export(adapter.parent, tmp_path / "out")
    assert torch.equal(logits(tiny, tmp_path / "out"), logits(tiny, adapter))
    export(adapter.parent, tmp_path / "half", dtype="bf16")
    values = weights(tmp_path / "half", "adapter_model.safetensors").values()
    assert {value.dtype for value in values} == {torch.bfloat16}


def test_a_lost_base_model_is_named(adapter: Path, tmp_path: Path) -> None:
    run = shutil.copytree(adapter, tmp_path / "run")
    path = run / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "/nowhere/llama"}))
    with pytest.raises(ModelError, match="base model /nowhere/llama cannot be loaded") as caught:
        export(run, tmp_path / "out", merge=True)
    assert caught.value.where == str(path)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_targets_that_would_be_overwritten_are_refused(full_run: Path, tmp_path: Path) -> None:
    busy = tmp_path / "busy"
    busy.mkdir()
    (busy / "mine.txt").write_text("keep")
    with pytest.raises(OutputError, match="holds 1 entries"):
        export(full_run, busy)
    with pytest.raises(OutputError, match="this is a file"):
        export(full_run, busy / "mine.txt")
    with pytest.raises(OutputError, match="within the model's own folder"):
        export(full_run, full_run / "model" / "out")
    assert [p.name for p in busy.iterdir()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    export(full_run, tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").is_file()


def test_a_full_disk_leaves_nothing(full_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copyfile(source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    monkeypatch.setattr(module.shutil, "copyfile", copyfile)
    with pytest.raises(OutputError, match="No space left"):
        export(full_run, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_what_is_no_run_is_told_apart(tmp_path: Path, full_run: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        export(tmp_path / "typo", tmp_path / "out")
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    with pytest.raises(ModelError, match="neither a run folder"):
        export(unfinished, tmp_path / "out")
    (unfinished / "run.yaml").write_text("run: {}\n")
    with pytest.raises(ModelError, match="not finished"):
        export(unfinished, tmp_path / "out")
    (full_run / "model" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        export(full_run, tmp_path / "out")
    with pytest.raises(ModelError, match="dtype is 'int8'"):
        export(full_run, tmp_path / "out", dtype="int8")
