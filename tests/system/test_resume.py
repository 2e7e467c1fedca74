"""A run that was killed and started again is the run that was never killed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.ranks import RankFailed, run_ranks
from support.runs import (
    assert_same_weights,
    checkpoint_names,
    ids_of,
    make_run,
    numbers_of,
    read_lines,
    run_training,
    train_until_killed,
    train_whole,
    updates_of,
    weights_of,
)
from unisono.checkpoint.manifest import read, verify

LORA = {"model": {"lora": {"rank": 4, "alpha": 8.0, "dropout": 0.1}}}
VALIDATED = {"data": {"validation": 0.2}, "validate": {"every": 2}}


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return an uninterrupted run of six updates on so many ranks; made once each."""
    runs: dict[int, Path] = {}

    def run(world: int) -> Path:
        if world not in runs:
            folder = tmp_path_factory.mktemp(f"whole{world}")
            train_whole(world, make_run(folder, tiny, **VALIDATED))
            runs[world] = folder / "run"
        return runs[world]

    return run


@pytest.mark.parametrize("world", [1, 2])
def test_killed_and_resumed_is_bitwise_the_same(
    tiny: Path, tmp_path: Path, whole: Callable[[int], Path], world: int
) -> None:
    file = make_run(tmp_path, tiny, **VALIDATED)
    train_until_killed(world, file, 5)
    assert checkpoint_names(tmp_path / "run") == ["update-00000002", "update-00000004"]
    assert "resumed update-00000004: 4 of 6 updates are done" in train_whole(world, file)
    assert_same_weights(tmp_path / "run", whole(world))
    assert numbers_of(tmp_path / "run") == numbers_of(whole(world))
    assert sum(line.get("kind") == "validation" for line in numbers_of(whole(world))) == 3
    assert ids_of(tmp_path / "run") == ids_of(whole(world))
    ours, reference = (read(run / "checkpoints/update-00000006") for run in (tmp_path / "run", whole(world)))
    assert ours.state == reference.state
    assert ours.state["best_validation_loss"] == min(
        line["loss"] for line in numbers_of(whole(world)) if line.get("kind") == "validation"
    )


def test_a_damaged_newest_checkpoint_is_passed_over(tiny: Path, tmp_path: Path, whole: Callable[[int], Path]) -> None:
    file = make_run(tmp_path, tiny, **VALIDATED)
    train_until_killed(2, file, 5)
    damaged = tmp_path / "run/checkpoints/update-00000004"
    os.truncate(damaged / "__1_0.distcp", 1000)
    said = train_whole(2, file)
    assert "ignored update-00000004: __1_0.distcp has 1000 bytes, its manifest says" in said
    assert "resumed update-00000002: 2 of 6 updates are done" in said
    assert_same_weights(tmp_path / "run", whole(2))
    assert numbers_of(tmp_path / "run") == numbers_of(whole(2))
    verify(damaged)  # written anew, whole


def test_a_named_checkpoint_is_taken_or_refused(tiny: Path, tmp_path: Path, whole: Callable[[int], Path]) -> None:
    file = make_run(tmp_path, tiny, **VALIDATED)
    there = whole(1) / "checkpoints"
    said = train_whole(1, file, f"checkpoint.resume={there}/update-00000004")
    assert "resumed update-00000004: 4 of 6" in said
    assert_same_weights(tmp_path / "run", whole(1))
    damaged = tmp_path / "damaged"
    shutil.copytree(there / "update-00000004", damaged)
    (damaged / ".metadata").unlink()
    with pytest.raises(RankFailed, match=r"OutputError: .*damaged: \.metadata is missing"):
        train_whole(1, file, f"checkpoint.resume={damaged}", f"run.output_dir={tmp_path}/other")


@pytest.mark.parametrize("variant", ["lora", "sgd", "fp16"])
def test_it_holds_for(tiny: Path, tmp_path: Path, variant: str) -> None:
    sections: dict[str, Any] = {
        "lora": LORA,
        "sgd": {"optim": {"name": "sgd", "momentum": 0.9, "lr": 0.01}},
        "fp16": {},
    }[variant]
    function = train_fp16 if variant == "fp16" else run_training
    file = make_run(tmp_path, tiny, **sections, length={"updates": 4})
    run_ranks(function, 1, file, (f"run.output_dir={tmp_path}/whole",))
    with pytest.raises(RankFailed, match="died"):
        run_ranks(function, 1, file, (), 3)
    assert "resumed update-00000002" in run_ranks(function, 1, file)[0]
    assert_same_weights(tmp_path / "run", tmp_path / "whole")
    assert numbers_of(tmp_path / "run") == numbers_of(tmp_path / "whole")
    if variant == "fp16":
        manifest = json.loads((tmp_path / "run/checkpoints/update-00000004/manifest.json").read_bytes())
        assert manifest["state"]["precision"]["_growth_tracker"] == 4
        assert manifest["state"]["precision"]["scale"] == 65536.0


def train_fp16(rank: int, world: int, *args: Any) -> str:
    """Train with fp16 and its loss scale; on a CPU a person is refused that."""
    from unisono import train

    train.choose = lambda *_: ("fp16", "as the test asks")
    return run_training(rank, world, *args)


def test_b55_other_numbers_of_processes_train_the_same_samples(
    tiny: Path, tmp_path: Path, whole: Callable[[int], Path]
) -> None:
    file = make_run(tmp_path, tiny, **VALIDATED)
    run = tmp_path / "run"
    train_until_killed(2, file, 3)
    train_until_killed(1, file, 5)
    assert [line["update"] for line in read_lines(run / "events/rank1.jsonl") if "micro_batches" in line] == [1, 2]
    said = train_whole(3, file)
    assert "resumed update-00000004" in said and "was saved on 1 rank and goes on on 3" in said
    assert ids_of(run) == ids_of(whole(1)) == ids_of(whole(2))
    ours, reference = updates_of(run), updates_of(whole(1))
    assert [line["update"] for line in ours] == [1, 2, 3, 4, 5, 6]
    assert [line["lr"] for line in ours] == [line["lr"] for line in reference]
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in reference], abs=1e-5)


@pytest.mark.parametrize(("world", "prefetch"), [(1, 0), (2, 2)])
def test_b30_no_sample_comes_twice_or_never(tiny: Path, tmp_path: Path, world: int, prefetch: int) -> None:
    file = make_run(
        tmp_path, tiny, length={"epochs": 3}, checkpoint={"every": 4}, data={"prefetch": prefetch, "max_length": 256}
    )
    train_whole(world, file, f"run.output_dir={tmp_path}/whole")
    for update in (3, 14, 24):
        train_until_killed(world, file, update)
    assert "resumed update-00000020: 20 of 30" in train_whole(world, file)
    ids = ids_of(tmp_path / "run")
    assert ids == ids_of(tmp_path / "whole")
    epochs = [sorted(k for u in range(10 * e + 1, 10 * e + 11) for k in ids[u]) for e in range(3)]
    assert epochs == [list(range(20))] * 3
    assert numbers_of(tmp_path / "run") == numbers_of(tmp_path / "whole")


def test_b61_the_rate_goes_on(tiny: Path, tmp_path: Path) -> None:
    sections = {
        "optim": {"schedule": "cosine", "warmup": 2},
        "length": {"updates": 10},
        "checkpoint": {"every": 5},
    }
    file = make_run(tmp_path, tiny, **sections)
    train_whole(1, file, f"run.output_dir={tmp_path}/whole")
    train_until_killed(1, file, 6)
    with pytest.raises(RankFailed, match=r"updates in all: 10 then, 20 now[\s\S]*checkpoint.allow_changes"):
        train_whole(1, file, "length.updates=20")
    train_until_killed(1, file, 8, "length.updates=20", 'checkpoint.allow_changes=["updates in all"]')
    longer = [line["lr"] for line in updates_of(tmp_path / "run")]
    train_whole(1, file)
    rates = [line["lr"] for line in updates_of(tmp_path / "run")]
    expected = [line["lr"] for line in updates_of(tmp_path / "whole")]
    assert expected[:2] == [0.005, 0.01] and len(expected) == 10
    assert rates == pytest.approx(expected, rel=0, abs=1e-12)
    assert longer[5:] != expected[5:8] and longer[:5] == expected[:5]


def test_a_changed_run_is_refused(tiny: Path, tmp_path: Path) -> None:
    file = make_run(tmp_path, tiny, length={"updates": 2})
    train_until_killed(1, file, 2, "checkpoint.every=1")
    for setting, change in {
        "optim.lr": "optim.lr=0.02",
        "optim.lr_scaling": "optim.lr_scaling=linear optim.lr_reference_batch=1",
        "run.seed": "run.seed=1",
        "batch.global_size": "batch.global_size=4",
        "data": "data.max_length=64",
    }.items():
        with pytest.raises(RankFailed, match=rf"ConfigError: .*saved with other settings[\s\S]* {setting}: .* then, "):
            train_whole(1, file, *change.split())


def test_adapters_belong_to_their_base(tiny: Path, tiny_tied: Path, tmp_path: Path) -> None:
    """A LoRA checkpoint holds no base weights: on another base it would be another model, in silence."""
    file = make_run(tmp_path, tiny, **LORA, length={"updates": 2})
    train_until_killed(1, file, 2, "checkpoint.every=1")
    other = tmp_path / "other"
    other.mkdir()
    for source in tiny.iterdir():
        (other / source.name).write_bytes(source.read_bytes())
    with pytest.raises(RankFailed, match=r"model.path: .*tiny.* then, .*other.* now"):
        train_whole(1, file, f"model.path={other}")


def test_adapters_of_another_shape_are_named(tiny: Path, tmp_path: Path) -> None:
    file = make_run(tmp_path, tiny, model={"lora": {"rank": 4, "targets": ["q_proj"]}}, length={"updates": 2})
    train_until_killed(1, file, 2, "checkpoint.every=1")
    with pytest.raises(RankFailed, match=r"CheckpointError: .*does not fit this model[\s\S]*q_proj"):
        train_whole(1, file, 'model.lora.targets=["k_proj"]', 'checkpoint.allow_changes=["model.lora"]')


@pytest.mark.parametrize(("world", "written"), [(2, "~/a b/out"), (1, "$HOME/ä ö/läuf/"), (1, "relative/out")])
def test_b72_resume_finds_the_folder(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int, written: str
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    file = make_run(tmp_path, tiny, run={"output_dir": written}, length={"updates": 3}, checkpoint={"every": 1})
    with pytest.raises(RankFailed, match="died"):
        run_ranks(run_training, world, file, (), 2, env={"HOME": str(home)})
    said = run_ranks(run_training, world, file, env={"HOME": str(home)})[0]
    assert "resumed update-00000001" in said
    expected = home / written.replace("~/", "").replace("$HOME/", "")
    assert f"the model is in {expected}/model" in said
    assert [path.name for path in home.iterdir()] == [expected.relative_to(home).parts[0]]


def test_b60_completion_saves(tiny: Path, tmp_path: Path) -> None:
    file = make_run(tmp_path, tiny, length={"updates": 7}, checkpoint={"every": 5})
    train_whole(1, file)
    run = tmp_path / "run"
    assert checkpoint_names(run) == ["update-00000005", "update-00000007"]
    exported = weights_of(run)
    stored = stored_tensors(run / "checkpoints/update-00000007")
    compared = [name for name in stored if name.startswith("model/")]
    assert len(compared) == len(exported) > 0
    for name in compared:
        assert stored[name].numpy().tobytes() == exported[name.removeprefix("model/causal_lm.")].tobytes(), name


def stored_tensors(checkpoint: Path) -> dict[str, Any]:
    """Read all of a checkpoint by torch's own converter."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    whole_file = checkpoint.parent / "whole.pt"
    dcp_to_torch_save(checkpoint, whole_file)
    tensors: dict[str, Any] = torch.load(whole_file)
    return tensors


def test_a_finished_run_started_again_changes_nothing(tiny: Path, tmp_path: Path) -> None:
    file = make_run(tmp_path, tiny, length={"updates": 2})
    train_whole(2, file)
    run = tmp_path / "run"
    before = {name: (run / name).read_bytes() for name in ("metrics.jsonl", "samples.jsonl", "model/model.safetensors")}
    assert "resumed update-00000002: 2 of 2 updates are done" in train_whole(2, file)
    assert {name: (run / name).read_bytes() for name in before} == before
    assert checkpoint_names(run) == ["update-00000002"]


def test_never_is_refused_where_checkpoints_are(tiny: Path, tmp_path: Path) -> None:
    file = make_run(tmp_path, tiny, length={"updates": 2})
    train_whole(1, file, "checkpoint.resume=never")
    with pytest.raises(
        RankFailed, match=r"OutputError: .*holds checkpoints of an earlier run, such as update-00000002"
    ):
        train_whole(1, file, "checkpoint.resume=never")
    assert checkpoint_names(tmp_path / "run") == ["update-00000002"]


def test_a_second_run_in_the_folder_is_refused(tiny: Path, tmp_path: Path) -> None:
    file = make_run(tmp_path, tiny, length={"updates": 1})
    (tmp_path / "run").mkdir()
    with (tmp_path / "run/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # the weakest lock there is: the run must want it for itself alone
        with pytest.raises(RankFailed, match=r"OutputError: .*another process is writing to"):
            train_whole(1, file)
        assert os.listdir(tmp_path / "run") == [".lock"]
    train_whole(1, file)


def train_without_model(rank: int, world: int, *args: Any) -> str:
    """Fail if the run comes as far as its model."""
    from unisono import train

    def touched(*_: Any) -> None:
        raise AssertionError("the model or the data was touched")

    train.prepare = touched
    return run_training(rank, world, *args)


def test_b63_the_output_folder_is_tried_before_the_model(tiny: Path, tmp_path: Path) -> None:
    file = make_run(tmp_path, tiny, length={"updates": 1})
    (tmp_path / "a_file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for bad in ("a_file", "a_file/below", "dangling"):
        with pytest.raises(RankFailed, match="OutputError"):
            run_ranks(train_without_model, 1, file, (f"run.output_dir={tmp_path}/{bad}",))
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    train_whole(1, file, f"run.output_dir={tmp_path}/link")
    assert (tmp_path / "target/model").is_dir()
