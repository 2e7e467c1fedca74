"""What keys say together: each contradiction is refused with its values, all of them at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.runfile import write_run
from unisono.config.check import check, check_machine, check_world
from unisono.config.load import Loaded, load
from unisono.config.render import render
from unisono.errors import ConfigError


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(*overrides: str) -> Loaded:
    return load(write_run(Path()), overrides)


def refusal(*overrides: str) -> str:
    loaded = read(*overrides)
    with pytest.raises(ConfigError) as error:
        check(loaded.config, loaded.origins)
    assert error.value.exit_code == 2
    return str(error.value)


def test_sound_file_passes() -> None:
    loaded = read()
    check(loaded.config, loaded.origins)
    check_world(loaded.config, 8)
    check_machine(loaded.config, 0)


@pytest.mark.parametrize("pack", ["true", "false"])
@pytest.mark.parametrize("attention", ["auto", "document", "sdpa", "eager"])
def test_b70_packing_goes_with_every_backend_that_is_offered(pack: str, attention: str) -> None:
    check(read(f"data.pack={pack}", f"model.attention={attention}").config)


def test_b70_packing_with_a_backend_that_cannot_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.attention is \"flash\", but it takes one of auto, document"):
        read("data.pack=true", "model.attention=flash")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["batch.global_size=null"], "batch.global_size (samples) or batch.global_tokens"),
        (["batch.global_tokens=4096"], "batch.global_size 8 and batch.global_tokens 4096 are both given"),
        (["batch.micro_size=2", "batch.micro_tokens=512"], "batch.micro_size 2 and batch.micro_tokens 512"),
        (
            ["batch.global_size=null", "batch.global_tokens=9", "batch.micro_size=2"],
            "batch.micro_size 2 needs batch.global_size",
        ),
        (["length.epochs=null"], "length.epochs or length.updates"),
        (["length.updates=5"], "length.epochs 1 and length.updates 5 are both given"),
        (["length={updates: 5}", "optim.warmup=6"], "optim.warmup is 6 updates, but the run has length.updates 5"),
        (["optim.lr_scaling=linear"], "optim.lr_scaling linear needs optim.lr_reference_batch"),
        (
            ["optim.lr_scaling=sqrt", "optim.lr_reference_batch=8", "batch={global_tokens: 9}"],
            "optim.lr_scaling sqrt needs batch.global_size",
        ),
        (["optim.lr_reference_batch=8"], "optim.lr_reference_batch 8 has no effect"),
        (["optim.momentum=0.9"], "optim.momentum 0.9 has no effect: it needs optim.name sgd"),
        (["optim.name=sgd", "optim.betas=[0.8, 0.9]"], "optim.betas (0.8, 0.9) has no effect"),
        (["optim.max_nonfinite=5"], "optim.max_nonfinite 5 has no effect"),
        (["data.max_skipped=5"], "data.max_skipped 5 has no effect"),
        (["validate.every=5"], "validate.every 5 has no effect"),
        (["strategy.name=single", "launch.ranks=2"], "strategy.name is single, but there are 2 ranks"),
        (["strategy.shard_ranks=2"], "strategy.shard_ranks 2 has no effect: it needs strategy.name fsdp2"),
        (
            ["strategy={name: fsdp2, shard_ranks: 4}", "launch.ranks=6"],
            "strategy.shard_ranks is 4, and 6 ranks do not divide into groups of 4",
        ),
        (["strategy.reshard_after_forward=false"], "strategy.reshard_after_forward False has no effect"),
        (["strategy.cpu_offload=true"], "strategy.cpu_offload True has no effect: it needs strategy.name fsdp2"),
        (
            ["strategy={name: fsdp2, cpu_offload: true}", "precision.compute=fp16"],
            "strategy.cpu_offload does not go with precision.compute fp16",
        ),
        (["optim.in_backward=true"], "steps before the norm of all gradients is known, and optim.max_grad_norm is 1.0"),
        (
            ["optim={in_backward: true, max_grad_norm: null, on_nonfinite: skip}"],
            "has stepped when a bad gradient is found, which optim.on_nonfinite skip would leave out",
        ),
        (
            ["optim={in_backward: true, max_grad_norm: null}", "precision.compute=fp16"],
            "optim.in_backward cannot wait for the loss scale of fp16",
        ),
        (["optim={in_backward: true, max_grad_norm: null}", "strategy.name=ddp"], "does not go with ddp"),
        (
            ["optim={in_backward: true, max_grad_norm: null}", "strategy={name: fsdp2, cpu_offload: true}"],
            "optim.in_backward does not go with strategy.cpu_offload",
        ),
        (
            ["optim={in_backward: true, max_grad_norm: null}", "launch.ranks=2"],
            "optim.in_backward on 2 ranks needs strategy.name fsdp2",
        ),
        (["strategy.name=single", "strategy.bucket_mib=5"], "strategy.bucket_mib 5 has no effect"),
        (["precision.weights=bf16", "precision.compute=fp32"], "precision.weights bf16 cannot be computed"),
        (["launch.env.RANK=1"], "launch.env.RANK is set by the launcher itself"),
        (["launch.env.UNISONO_LAUNCH={}"], "launch.env.UNISONO_LAUNCH is set by the launcher itself"),
        (["launch.env.HF_TOKEN=x"], "launch.env.HF_TOKEN looks like a secret"),
        (["launch.env.WANDB_API_KEY=x"], "launch.env.WANDB_API_KEY looks like a secret"),
        (["launch.env={'a b': c}"], "launch.env has 'a b', but a variable's name"),
        (["launch.env.OMP_NUM_THREADS=2", "launch.threads=3"], "launch.threads 3 are both given"),
        (["model.lora.targets=[]"], "model.lora.targets is empty"),
        (["model.path=./nowhere"], "nowhere does not exist"),
        (["model.path=./train.jsonl"], "train.jsonl is not a folder"),
        (["checkpoint.resume=nowhere"], "nowhere does not exist"),
        (["log.profile=12..10"], "log.profile is 12..10: no update is in that range"),
        (["length={updates: 5}", "log.profile=4..6"], "log.profile is 4..6, but the run has 5 updates"),
    ],
)
def test_contradictions(overrides: list[str], message: str) -> None:
    text = refusal(*overrides)
    assert message in text
    assert "problems" not in text


@pytest.mark.parametrize(
    "overrides",
    [
        ["optim.name=sgd", "optim.momentum=0.9"],
        ["validate.every=5", "data.validation=0.1"],
        ["data.on_error=skip", "data.max_skipped=5"],
        ["optim.lr_scaling=linear", "optim.lr_reference_batch=4"],
        ["batch={global_tokens: 4096, micro_tokens: 512}"],
        ["length={updates: 5}", "optim.warmup=5"],
        ["precision.weights=bf16"],
        ["length={updates: 5}", "log.profile=5..5"],
        ["log.profile=none"],
        ["strategy={name: fsdp2, shard_ranks: 4}", "launch.ranks=8"],
        ["strategy={name: fsdp2, shard_ranks: 4}"],
        ["strategy={name: fsdp2, cpu_offload: true}"],
        ["optim={in_backward: true, max_grad_norm: null}"],
        ["optim={in_backward: true, max_grad_norm: null}", "strategy.name=fsdp2", "launch.ranks=2"],
    ],
)
def test_combinations_that_go(overrides: list[str]) -> None:
    check(read(*overrides).config)


@pytest.mark.parametrize("asked", ["10", "a..b", "0..4", "3..", "3...4", "-1..4"])
def test_a_profile_names_its_first_and_last_update(asked: str) -> None:
    with pytest.raises(ConfigError, match=r"it takes none, or text such as 10\.\.12"):
        read(f"log.profile={asked}")


def test_problems_come_at_once_and_with_their_origin() -> None:
    text = refusal("batch.global_tokens=9", "length.epochs=null", "data.train=[a.jsonl, b.jsonl]")
    assert text.startswith("4 problems")
    assert "command line: batch.global_size 8 and batch.global_tokens 9" in text
    assert "a.jsonl does not exist" in text
    assert "b.jsonl does not exist" in text
    assert refusal("optim.name=sgd", "optim.eps=1.0").startswith("command line: optim.eps 1.0")


def test_b07_global_batch_that_does_not_divide_names_the_three_numbers() -> None:
    text = refusal("batch.global_size=8", "batch.micro_size=3", "launch.ranks=2")
    assert "batch.global_size 8" in text
    assert "batch.micro_size 3" in text
    assert "2 ranks" in text
    assert "a multiple of 3 x 2 = 6" in text
    assert "batch.global_size=6 or 12, or batch.micro_size=2, or batch.micro_tokens" in text


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_b07_global_batch_that_divides_passes(ranks: int) -> None:
    check_world(read("batch.micro_size=2").config, ranks)


def test_b07_ranks_that_torchrun_brings_are_judged_too() -> None:
    config = read("batch.micro_size=2").config
    check(config)
    with pytest.raises(ConfigError, match="on 3 ranks: it must be a multiple of 2 x 3 = 6"):
        check_world(config, 3)
    with pytest.raises(ConfigError, match=r"strategy\.name is single, but there are 2 ranks"):
        check_world(read("strategy.name=single").config, 2)


@pytest.mark.parametrize("size", [1, 5, 8, 9, 30])
@pytest.mark.parametrize("micro", [2, 3, 7, 40])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_b07_suggested_values_are_right(size: int, micro: int, ranks: int) -> None:
    config = read(f"batch.global_size={size}", f"batch.micro_size={micro}").config
    if size % (micro * ranks) == 0:
        check_world(config, ranks)
        return
    with pytest.raises(ConfigError) as error:
        check_world(config, ranks)
    sizes, *micros = (error.value.hint or "").removesuffix(", or batch.micro_tokens, which always fits").split(", or ")
    for value in sizes.removeprefix("use batch.global_size=").split(" or "):
        assert int(value) % (micro * ranks) == 0
    for value in micros:
        assert size % (int(value.removeprefix("batch.micro_size=")) * ranks) == 0


def test_b75_fp16_on_a_cpu_is_refused_with_the_alternative() -> None:
    config = read("precision.compute=fp16").config
    with pytest.raises(ConfigError, match=r"fp16, but no GPU is visible(.|\n)*precision.compute=auto"):
        check_machine(config, 0)
    check_machine(config, 1)


def test_data_files_of_every_wrong_kind_are_named() -> None:
    Path("folder").mkdir()
    Path("link.jsonl").symlink_to("gone.jsonl")
    os.mkfifo("pipe.jsonl")
    text = refusal("data.train=[folder, link.jsonl, pipe.jsonl, train.jsonl]", "data.validation=[train.jsonl, no.json]")
    assert "folder is a folder, and no saved Hugging Face data set" in text
    assert "link.jsonl is a link to gone.jsonl, which does not exist" in text
    assert "pipe.jsonl is not a regular file" in text
    assert "no.json does not exist" in text
    assert "train.jsonl is in data.train and in data.validation" in text
    assert text.startswith("5 problems")


def load_again(loaded: Loaded) -> Loaded:
    """Read back what ``unisono config`` shows: the order of sources is part of it."""
    Path("again.yaml").write_text(render(loaded), encoding="utf-8")
    return load(Path("again.yaml"))


def test_sources_sets_and_streams_are_judged() -> None:
    sources = ("data.train={math: [train.jsonl], chat: ['chat-*.jsonl', 's3://bucket/{0..3}.tar']}",)
    good = read(*sources, "data.weights={math: 2}", "data.validation={held: ['held*.jsonl']}")
    check(good.config, good.origins)
    assert list(load_again(good).config.data.train) == ["math", "chat"]
    assert "data.weights names 'mth', but the sources of data.train are math, chat" in refusal(
        *sources, "data.weights={mth: 2}"
    )
    assert "data.validation has a part named all" in refusal("data.validation={all: ['held*.jsonl']}")
    assert "data.train has a part named all" in refusal("data.train={all: [train.jsonl]}", "data.validation=0.1")
    assert "part named all" not in refusal(
        "data.train={all: [train.jsonl]}", "data.overlong=split", "data.format=messages"
    )
    assert "data.train.math: " in refusal("data.train={math: [gone.jsonl]}")
    assert "data.overlong split cuts plain texts" in refusal("data.overlong=split", "data.format=messages")
    stream = ("data.mode=stream", "data.validation=0.1", "data.weights={a: 1}", "data.train={a: [train.jsonl]}")
    text = refusal(*stream)
    for needle in ("length.epochs needs", "data.validation as a share needs", "data.weights need"):
        assert needle in text
    assert "validate.generate 4 needs the whole model" in refusal(
        "validate.generate=4", "strategy.name=fsdp2", "data.validation=0.1"
    )
    assert "validate.generate 4 has no effect" in refusal("validate.generate=4")
    assert "data.shuffle_window 5 has no effect" in refusal("data.shuffle_window=5")


def test_unknown_names_in_data_fields_are_refused_with_the_known_ones() -> None:
    read_and_judged = read("data.fields={prompt: question, completion: answer, role: speaker}")
    check(read_and_judged.config)
    text = refusal("data.fields={promt: question, xyz: answer}")
    assert "data.fields names 'promt', which is no field: messages, conversations, tools" in text
    assert "did you mean prompt?" in text and "data.fields names 'xyz'" in text


def test_variables_that_only_look_alike_are_passed_on() -> None:
    config = read(
        "launch.env={TOKENIZERS_PARALLELISM: 'true', KEYBOARD: us, NCCL_ALGO: Ring, OMP_NUM_THREADS: '2'}"
    ).config
    check(config)
    assert len(config.launch.env) == 4
