"""`unisono tune`: its statistic, its list of settings, its order of trials; and the whole of it on two real ranks."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from support.launching import MARK, MODULES, alive, wait_until
from support.ranks import run_ranks
from support.runs import make_run
from unisono.config.check import check, check_world
from unisono.config.load import load
from unisono.config.schema import RunConfig
from unisono.drill.scratch import Outcome, Scratch
from unisono.errors import ConfigError, OutputError
from unisono.resume import FIXED
from unisono.stopping import AGAIN
from unisono.tune.candidates import ENV, MIB, LeftOut, Seen, Setting, Situation, candidates, changed
from unisono.tune.run import chosen, tune
from unisono.tune.statistic import NOISE, is_hopeless, judge, log_ratio, student
from unisono.tune.trials import Budget, DoesNotRun, Evidence, climb


@pytest.mark.parametrize(
    ("share", "freedom", "t"),
    [
        (0.95, 1, 12.706),
        (0.95, 2, 4.303),
        (0.95, 5, 2.571),
        (0.99, 3, 5.841),
        (0.90, 10, 1.812),
        (0.999, 30, 3.646),
    ],
)
def test_students_t_is_that_of_the_tables(share: float, freedom: int, t: float) -> None:
    assert student(share, freedom) == pytest.approx(t, abs=6e-4)


@pytest.mark.parametrize(("pairs", "tried"), [(2, 1), (4, 1), (6, 8), (6, 1)])
def test_noise_alone_is_kept_no_more_often_than_said(pairs: int, tried: int) -> None:
    """Half of the noise's share: a setting must be faster to be kept, not only different."""
    generator, rounds = random.Random(pairs * 100 + tried), 4000 // tried

    def kept() -> bool:
        noise = [generator.gauss(0.0, 0.03) for _ in range(pairs)]
        return not is_hopeless(noise) and judge(noise, tried).is_gain

    share = sum(any(kept() for _ in range(tried)) for _ in range(rounds)) / rounds
    assert share <= NOISE / 2 + 4 * math.sqrt(NOISE / 2 / rounds)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), tried=st.integers(1, 12), drift=st.floats(-0.01, 0.01))
def test_a_tenth_in_small_noise_is_kept_and_its_loss_is_not(seed: int, tried: int, drift: float) -> None:
    """Also on a machine that grows slower or faster by up to 1 % a run: the order within a pair changes."""
    generator = random.Random(seed)
    speed = [math.exp(drift * run + generator.uniform(-0.005, 0.005)) for run in range(12)]
    pairs = [math.log(1.10) + (-1) ** k * math.log(speed[2 * k + 1] / speed[2 * k]) for k in range(6)]
    found = judge(pairs, tried)
    assert found.is_gain and found.low <= found.mean <= found.high and found.mean == pytest.approx(1.10, rel=0.006)
    lost = judge([-each for each in pairs], tried)
    assert not lost.is_gain and is_hopeless([-each for each in pairs])
    assert (lost.low, lost.high) == pytest.approx((1 / found.high, 1 / found.low))


def test_a_gain_that_is_not_worth_a_line_is_not_kept() -> None:
    assert judge([0.005, 0.0051, 0.0049, 0.005], 1).low > 1
    assert not judge([0.005, 0.0051, 0.0049, 0.005], 1).is_gain
    with pytest.raises(ValueError, match="1 pairs say nothing"):
        judge([0.5], 1)


@given(seconds=st.lists(st.floats(0.01, 100), min_size=3, max_size=9), factor=st.floats(0.1, 10))
def test_a_disturbed_update_weighs_nothing(seconds: list[float], factor: float) -> None:
    faster = [each / factor for each in seconds]
    faster[0] *= 1000
    assert log_ratio(seconds, faster) == pytest.approx(math.log(factor), abs=1e-9)


BASE: dict[str, dict[str, Any]] = {
    "run": {"output_dir": "out"},
    "model": {"path": "starter"},
    "data": {"train": ["s3://bucket/train.jsonl"]},
    "batch": {"global_size": 16},
    "length": {"updates": 9},
}
SEEN = Seen("ddp", gradient_bytes=500 * MIB, micro_batches=4, micro_batch_tokens=2000, data_share=0.1)
CPU = Situation(RunConfig.model_validate(BASE), ranks=2, gpus=0, cores=8, seen=SEEN)


def situation(here: Situation = CPU, *, seen: Mapping[str, Any] = {}, **sections: Any) -> Situation:
    """Change ``here``: sections of the run file, what was seen, and anything else of it."""
    own = {key: sections.pop(key) for key in ("ranks", "gpus", "cores", "environment") if key in sections}
    values = {**BASE, **{name: {**BASE.get(name, {}), **keys} for name, keys in sections.items()}}
    return Situation(
        **{
            **vars(here),
            "config": RunConfig.model_validate(values),
            "seen": Seen(**{**vars(here.seen), **seen}),
            **own,
        }
    )


def names(here: Situation) -> tuple[list[str], dict[str, str]]:
    tried, left_out = candidates(here)
    return [each.name for each in tried], {each.name: each.reason for each in left_out}


def test_what_is_tried_on_a_cpu() -> None:
    tried, left_out = names(CPU)
    assert tried == [
        "batch.micro_tokens=4096",
        "batch.micro_tokens=8192",
        "batch.micro_tokens=1024",
        "model.attention=sdpa",
        "data.prefetch=4",
        "data.prefetch=8",
        "strategy.bucket_mib=8",
        "strategy.bucket_mib=100",
        "strategy.share_optimizer=true",
        "launch.threads=3",
        "OMP_WAIT_POLICY=PASSIVE",
    ]
    for name in ("NCCL_ALGO=Ring", "NCCL_SOCKET_NTHREADS=4", "NCCL_NSOCKS_PERTHREAD=4"):
        assert left_out[name] == "ignored: ranks on a CPU use gloo, and only NCCL reads it"
    assert "torch.compile" in left_out


def test_what_cannot_act_is_left_out_with_the_reason() -> None:
    tried, left_out = names(situation(seen={"micro_batches": 1, "data_share": 0.001, "gradient_bytes": 7 * MIB}))
    assert tried[0] == "batch.micro_tokens=1024" and "strategy.share_optimizer=true" in tried
    assert left_out["a larger batch.micro_tokens"].endswith("is one micro-batch already")
    assert left_out["data.prefetch"] == "ranks wait for data 0.1% of the time: there is nothing to gain"
    assert left_out["strategy.bucket_mib=8"] == "7.0 MiB of gradients are one bucket either way"
    tried, left_out = names(situation(ranks=1, gpus=1))
    assert not any("strategy" in name or "NCCL" in name for name in tried)
    assert left_out["NCCL_ALGO=Ring"] == "ignored: one rank exchanges nothing"
    assert names(situation(cores=2))[1]["OMP_WAIT_POLICY=PASSIVE"] == "a rank with one thread waits for none"


def test_what_nccl_ignores_is_named_and_what_it_heeds_is_tried() -> None:
    gpus = {"gpus": 4, "ranks": 4}
    tried, left_out = names(situation(**gpus, environment={"NCCL_TREE_THRESHOLD": "0"}))
    assert {"NCCL_ALGO=Ring", "NCCL_ALGO=allreduce:tree"} < set(tried) and not any("threads" in name for name in tried)
    assert left_out["NCCL_TREE_THRESHOLD (set here)"] == "NCCL has ignored it since 2.5"
    assert "of the socket transport" in left_out["NCCL_SOCKET_NTHREADS=4"]
    sockets = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    assert "NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4" in names(situation(**gpus, launch={"env": sockets}))[0]
    assert "NCCL_ALGO=Ring" not in names(situation(**gpus, environment={"NCCL_ALGO": "Ring"}))[0]
    sharded, left_out = names(situation(**gpus, seen={"strategy": "fsdp2"}, strategy={"name": "fsdp2"}))
    assert not any("bucket" in name or "tree" in name or "share" in name for name in sharded)
    assert "NCCL_DEBUG (set here)" in names(situation(environment={"NCCL_DEBUG": "INFO"}))[1]


FORMS = st.fixed_dictionaries(
    {
        "batch": st.sampled_from([{}, {"micro_tokens": 512}, {"micro_size": 2}, {"micro_size": 4}]),
        "model": st.sampled_from([{}, {"attention": "eager"}, {"activation_checkpointing": "offload"}]),
        "data": st.sampled_from([{}, {"pack": False}, {"prefetch": 6}]),
        "strategy": st.sampled_from([{}, {"share_optimizer": True}, {"name": "fsdp2", "exchange": "micro_batch"}]),
        "launch": st.sampled_from([{}, {"threads": 3}, {"allocator": "none"}, {"env": {"OMP_NUM_THREADS": "2"}}]),
    }
)


@settings(max_examples=60, deadline=None)
@given(
    sections=FORMS,
    ranks=st.sampled_from([1, 2, 4]),
    on_gpus=st.booleans(),
    cores=st.integers(1, 16),
    tokens=st.integers(1, 9000),
    micro_batches=st.integers(1, 5),
    gradients=st.integers(1, 200 * MIB),
)
def test_no_setting_touches_the_numbers_and_the_run_file_takes_each(
    sections: dict[str, Any], ranks: int, on_gpus: bool, cores: int, tokens: int, micro_batches: int, gradients: int
) -> None:
    strategy = "single" if ranks == 1 else sections["strategy"].get("name", "ddp")
    seen = {"strategy": strategy, "micro_batch_tokens": tokens, "micro_batches": micro_batches}
    here = situation(
        seen={**seen, "gradient_bytes": gradients}, ranks=ranks, gpus=ranks * on_gpus, cores=cores, **sections
    )
    tried, left_out = candidates(here)
    for setting in tried:
        config = changed(here.config, setting.changes)
        check(config)
        check_world(config, ranks)
        assert config != here.config
        for section, keys in FIXED.items():
            assert all(dict(dict(config)[section])[key] == dict(dict(here.config)[section])[key] for key in keys)
        if ranks == 1:
            assert not any(key.startswith(("strategy.", f"{ENV}NCCL")) for key in setting.changes)
        if not on_gpus:
            assert not any("NCCL" in key for key in setting.changes)
    assert len({each.name for each in tried}) == len(tried)
    for name in ("NCCL_ALGO=Ring", "NCCL_SOCKET_NTHREADS=4", "NCCL_NSOCKS_PERTHREAD=4"):
        assert sum(name in each.name for each in [*tried, *left_out]) == 1


FAST, SLOW, BROKEN, MORE = (
    Setting({"data.prefetch": 4}, ""),
    Setting({"strategy.bucket_mib": 8}, ""),
    Setting({"batch.micro_tokens": 9}, ""),
    Setting({"data.prefetch": 8}, ""),
)


class Bench:
    """A machine whose clock its trials move."""

    def __init__(self, noise: float = 0.002) -> None:
        self.time = 0.0
        self.asked: list[dict[str, object]] = []
        self._noise, self._generator = noise, random.Random(0)

    def measure(self, changes: Mapping[str, object]) -> list[float]:
        self.asked.append(dict(changes))
        self.time += 10
        if "batch.micro_tokens" in changes:
            raise DoesNotRun("out of memory")
        speed = {4: 1.2, 8: 1.4}.get(changes.get("data.prefetch"), 1.0)  # type: ignore[call-overload]
        speed *= 0.8 if "strategy.bucket_mib" in changes else 1.0
        return [seconds / speed * self._generator.uniform(1, 1 + self._noise) for seconds in (2.0, 3.0, 4.0)]

    def climb(self, tried: list[Setting], seconds: float = 1e4) -> list[Evidence]:
        said: list[str] = []
        found = climb(tried, self.measure, Budget(seconds, 20, lambda: self.time), 4, said.append)
        assert len(said) == len(found) == len(tried)
        return found


def test_each_setting_is_tried_beside_the_best_so_far_in_turning_pairs() -> None:
    bench = Bench()
    fast, slow, broken, more = bench.climb([FAST, SLOW, BROKEN, MORE])
    assert [each.kept for each in (fast, slow, broken, more)] == [True, False, False, True]
    a, b = {}, FAST.changes
    assert bench.asked[:8] == [a, b, b, a, a, b, b, a]
    assert bench.asked[8:12] == [b, {**b, **SLOW.changes}, {**b, **SLOW.changes}, b], "and no more of what is slower"
    assert bench.asked[12:14] == [b, {**b, **BROKEN.changes}]
    assert bench.asked[14:16] == [b, MORE.changes]
    assert fast.ratio is not None and fast.ratio.mean == pytest.approx(1.2, rel=0.01)
    assert more.ratio is not None and more.ratio.mean == pytest.approx(1.4 / 1.2, rel=0.01)
    assert str(broken) == "does not run: out of memory" and str(slow).endswith("x, 2 pairs: not faster")
    assert str(fast).endswith("4 pairs: kept")


def test_time_that_is_up_ends_the_trials() -> None:
    bench = Bench()
    fast, more = bench.climb([FAST, MORE], seconds=65)
    assert len(fast.pairs) == 3 and fast.ratio is not None
    assert (more.problem, more.kept, str(more)) == ("time is up", False, "time is up")
    assert bench.time <= 65


def test_a_run_file_that_fails_by_itself_is_told() -> None:
    def measure(changes: Mapping[str, object]) -> list[float]:
        raise DoesNotRun("no")

    with pytest.raises(DoesNotRun, match="no"):
        climb([FAST], measure, Budget(1e4, 1), 4, lambda text: None)


def test_only_what_is_named_is_tried() -> None:
    left_out = [LeftOut("NCCL_ALGO=Ring", "")]
    assert chosen([FAST, SLOW], left_out, ["prefetch", "NCCL"]) == ([FAST], left_out)
    assert chosen([FAST, SLOW], left_out, []) == ([FAST, SLOW], left_out)
    with pytest.raises(ConfigError, match="--only learning is none"):
        chosen([FAST, SLOW], left_out, ["learning"])


def measure_here(rank: int, world: int, arguments: list[str]) -> int:
    from unisono.tune.worker import measure

    return measure(arguments)


def in_ranks_of_ours(self: Scratch, name: str, changes: dict[str, Any]) -> Outcome:
    """Run without the launcher, whose ranks would import everything anew; some micro-batches are too large."""
    if changes.get("batch.micro_tokens") == 256:
        return Outcome(self.folder / name, 1, [])
    fixed = {**self._fixed(self.folder / name), **changes}
    texts = [f"{key}={value if isinstance(value, Path) else json.dumps(value)}" for key, value in fixed.items()]
    assert run_ranks(measure_here, 2, [str(self._loaded.path), *self._given, *texts]) == [0, 0]
    return Outcome(self.folder / name, 0, [])


SHORT: dict[str, Any] = {"updates": 6, "pairs": 2, "minutes": 5.0, "force": False, "only": ["micro_tokens"]}
TWO_RANKS: dict[str, Any] = {
    "batch": {"global_size": 8, "micro_tokens": 64},
    "data": {"validation": 0.1},
    "launch": {"ranks": 2, "timeout_seconds": 30},
}


@pytest.mark.timeout(110)
def test_a_real_run_is_tuned(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scratch, "run", in_ranks_of_ours)
    file, out = make_run(tmp_path, tiny, **TWO_RANKS), tmp_path / "tuned.yaml"
    said: list[str] = []
    assert tune(load(file, ["run.seed=7"]), ["run.seed=7"], out, **SHORT, say=said.append) == 0
    figures = json.loads(out.with_suffix(".json").read_text())
    fewer, broken = figures["settings"]
    assert (fewer["name"], broken["name"]) == ("batch.micro_tokens=128", "batch.micro_tokens=256")
    assert broken["problem"] == "does not run: exit code 1" and not broken["kept"]
    assert [len(run) for run in fewer["without"] + fewer["within"]] == [4] * 4, "updates that count, in two pairs"
    ratios = [log_ratio(*pair) for pair in zip(fewer["without"], fewer["within"])]
    assert fewer["ratio"]["mean"] == pytest.approx(math.exp(sum(ratios) / 2)) and fewer["log_ratios"] == ratios
    assert fewer["kept"] == (fewer["ratio"]["low"] > 1 and fewer["ratio"]["mean"] >= 1.01)
    assert figures["kept"] == ({"batch.micro_tokens": 128} if fewer["kept"] else {})
    tuned = load(out)
    check(tuned.config, tuned.origins)
    assert tuned.config == load(file, ["run.seed=7", *(f"{k}={v}" for k, v in figures["kept"].items())]).config
    assert "batch.micro_tokens=256: does not run" in out.read_text()
    assert not list(tmp_path.glob(".unisono-drill-*")) and not (tmp_path / "run").exists()
    with pytest.raises(OutputError, match=r"tuned.yaml exists"):
        tune(load(file), [], out, **SHORT, say=said.append)


def test_a_run_that_fails_is_told_with_its_last_lines(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Scratch, name: str, changes: dict[str, Any]) -> Outcome:
        os.write(2, b"Traceback\nValueError: no\n")  # as a rank does
        return Outcome(self.folder / name, 1, [])

    monkeypatch.setattr(Scratch, "run", fail)
    said: list[str] = []
    file = make_run(tmp_path, tiny, **TWO_RANKS)
    assert tune(load(file), [], tmp_path / "tuned.yaml", **SHORT, say=said.append) == 1
    assert said[-1] == (
        "tune: the run file itself does not run: ValueError: no\n  hint: its last lines were\nTraceback\nValueError: no"
    )
    assert not list(tmp_path.glob("*tuned*"))


def test_nothing_is_destroyed(tmp_path: Path, tiny: Path) -> None:
    file = make_run(tmp_path, tiny)
    force = {**SHORT, "force": True}
    for out, message in (
        (file, "is the run file itself"),
        (tmp_path / "tuned.json", "is to be a run file"),
        (tmp_path / "none" / "tuned.yaml", "there is no folder"),
    ):
        with pytest.raises(OutputError, match=message):
            tune(load(file), [], out, **force, say=print)


def test_a_text_that_cannot_be_changed_is_told_before_any_trial(tmp_path: Path, tiny: Path) -> None:
    values = yaml.safe_load(make_run(tmp_path, tiny).read_text())
    values["optim"]["warmup"] = values["run"]["seed"] = "here"
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values).replace("warmup: here", "warmup: &a 3").replace("seed: here", "seed: *a"))
    with pytest.raises(ConfigError, match="cannot be changed value by value"):
        tune(load(file, ["run.seed=1"]), ["run.seed=1"], tmp_path / "tuned.yaml", **SHORT, say=print)


@pytest.mark.timeout(110)
def test_a_trial_ends_by_itself_and_an_interrupt_leaves_nothing(tmp_path: Path, tiny: Path) -> None:
    """With the real launcher: the second trial begins only when the first one has come to its end."""
    file = make_run(tmp_path, tiny, **TWO_RANKS)
    program = "from unisono.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "tune", str(file), "--updates", "4"],
        env={**os.environ, "PYTHONPATH": MODULES, MARK: str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )
    try:
        wait_until(
            lambda: process.poll() is not None or any(tmp_path.glob(".unisono-drill-*/trial-2.log")),
            80,
            "the second trial",
        )
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=25)
    finally:
        process.kill()
    assert (process.returncode, said.splitlines()[-1]) == (AGAIN, "tune: stopped; nothing is written"), said
    assert alive(str(tmp_path)) == [] and not list(tmp_path.glob(".unisono-*"))
    assert not list(tmp_path.glob("*tuned*"))
