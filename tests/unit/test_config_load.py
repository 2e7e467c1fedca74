"""Reading the run file: every wrong key is named with its place and the nearest right one; values keep their kind."""

from __future__ import annotations

import copy
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.runfile import SOUND, write_run
from unisono.config.load import Loaded, load
from unisono.errors import ConfigError


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read(text: str = SOUND, *overrides: str) -> Loaded:
    return load(write_run(Path(), text), overrides)


def refusal(text: str = SOUND, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        read(text, *overrides)
    assert error.value.exit_code == 2
    return str(error.value)


def test_sound_file_is_read_with_defaults() -> None:
    loaded = read()
    assert loaded.config.run.seed == 1
    assert loaded.config.optim.schedule == "cosine"
    assert loaded.config.optim.betas == (0.9, 0.999)
    assert loaded.path == Path("run.yaml")


@pytest.mark.parametrize(
    ("line", "place", "suggestion"),
    [
        ("optim: {learning_rte: 1.0}", "optim.learning_rte", "optim.lr"),
        ("optim: {learning_rate: 1.0}", "optim.learning_rate", "optim.lr"),
        ("optim: {shedule: linear}", "optim.shedule", "optim.schedule"),
        ("lr: 1.0", "lr", "this key belongs to section optim: optim.lr"),
        ("optim: {weight-decay: 0.1}", "optim.weight-decay", "write it as optim.weight_decay"),
        ("optim: {LR: 0.1}", "optim.LR", "write it as optim.lr"),
        ("optim: {max_length: 128}", "optim.max_length", "this key belongs to section data: data.max_length"),
        ("log: {keep: 2}", "log.keep", "checkpoint.keep"),
        ("strategy: {every: 2}", "strategy.every", "checkpoint.every, validate.every, log.every"),
        ("precision: {optim: {lr: 1.0}}", "precision.optim", "optim is a section of its own"),
        ("optim.lr: 0.1", "optim.lr", "write the key lr below the section optim"),
        ("optimizer: {lr: 1.0}", "optimizer", "optim"),
        ("validation: {every: 3}", "validation", "this key belongs to section data: data.validation"),
        ("quux: {lr: 1.0}", "quux", "the sections are run, model"),
        ("log: {quux: 1}", "log.quux", "the keys of log are every, trackers, samples"),
    ],
)
def test_b70_unknown_or_misplaced_key(line: str, place: str, suggestion: str) -> None:
    text = SOUND.replace("optim:\n  lr: 2e-5\n", "") + line + "\n"
    start = time.monotonic()
    message = refusal(text)
    assert message.startswith(f"run.yaml:{len(text.splitlines())}: {place} is not a ")
    assert suggestion in message
    assert "problems" not in message  # one mistake, one problem
    assert time.monotonic() - start < 3


def test_b70_same_key_twice() -> None:
    message = refusal(SOUND + "log: {every: 1, every: 2}\n")
    assert "run.yaml:14: log.every is given twice, first in line 14" in message
    assert "run.yaml:14: optim is given twice, first in line 10" in refusal(SOUND + "optim: {}\n")


def test_b70_all_problems_at_once_in_the_order_of_the_file() -> None:
    text = SOUND.replace("seed: 1", "sed: 1").replace("8", "eight").replace("2e-5", "-1")
    message = refusal(text, "optim.lrr=1")
    places = [line.split(": ")[0] for line in message.splitlines() if not line.startswith(("  ", "4 problems"))]
    assert places == ["run.yaml:3", "run.yaml:9", "run.yaml:11", "override 'optim.lrr=1'"]


def test_misspelt_needed_key_is_one_problem() -> None:
    message = refusal(SOUND.replace("output_dir", "outputdir"))
    assert "did you mean run.output_dir?" in message
    assert "missing" not in message


def test_missing_keys_and_sections() -> None:
    message = refusal("run: {}\nmodel: {path: starter}\n")
    assert "run.yaml:1: run.output_dir is missing" in message
    assert "the section data is missing\n  hint: it needs train" in message
    assert "the section length is missing\n  hint: its keys are epochs, updates" in message


@pytest.mark.parametrize(
    ("value", "needs"),
    [
        ("run.seed=x", "a whole number from 0"),
        ('run.seed="7"', 'run.seed is "7"'),
        ("run.seed=007", 'run.seed is "007"'),
        ("run.seed=-1", "a whole number from 0"),
        ("run.seed=1.5", "a whole number"),
        ("run.seed=1e3", "write 1000"),
        ("run.seed=true", "run.seed is true"),
        ("run.seed=99999999999999999999", "below 9223372036854775808"),
        ("optim.lr=fast", "a number above 0"),
        ("optim.lr=.nan", "a number above 0"),
        ("optim.lr=1e999", "a number above 0"),
        ("optim.lr=", "optim.lr is empty"),
        ("optim.lr=0,1", "without quotes and with a decimal point"),
        ("optim.name=adam", "did you mean adamw?"),
        ("optim.betas=[0.9]", "a list of 2"),
        ("optim.betas=[0.9, 1]", "optim.betas[1] is 1"),
        ("data.train=a.jsonl", "write a list: train: [a.jsonl]"),
        ("data.train=[]", "at least one"),
        ("data.train=[1, {a: b}]", "data.train[1] is"),
        ("data.train={a: []}", "data.train.a is [], but it takes a list of text, at least one"),
        ("data.train={a: x}", 'data.train.a is "x", but it takes a list of text'),
        ("data.train={a b: [x]}", "a name is made of letters"),
        ("data.weights={a: -1}", "data.weights.a is -1, but it takes a number above 0"),
        ("data.validation=1.0", "a number from 0 to below 1, or a list of text"),
        ("data.pack=maybe", "true or false"),
        ("model.lora=8", "a section with the keys rank, alpha"),
        ("optim=fast", "a section with the keys name, lr"),
        ("launch.env=FAST", "names with text each"),
    ],
)
def test_wrong_values_are_shown_with_what_is_needed(value: str, needs: str) -> None:
    assert needs in refusal(SOUND, value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lr", "an override has the form section.key=value"),
        ("=3", "an override has the form section.key=value"),
        ("optim lr=3", "an override has the form section.key=value"),
        ("optimm.lr=1", "optim.lr"),
        ("foo.bar.lrr=1", "foo.bar.lrr is not a key"),
        ("data.train.0=x", "data.train has no keys below it"),
        ("model.lora.rnk=4", "did you mean model.lora.rank?"),
        ("log.every=a: [", "quote the value"),
        ("optim={lr: 1, lr: 2}", "optim.lr is given twice"),
        ("run.name=a\udcff", "printable text"),
        ("run.name=a\nb", "printable text"),
    ],
)
def test_bad_override_is_named(override: str, message: str) -> None:
    text = refusal(SOUND, override)
    assert text.startswith(f"override {override!r}: ")
    assert message in text


def test_overrides_win_and_the_last_one_first() -> None:
    config = read(SOUND, "optim.lr=1", "optim.lr=3e-4", "model.lora.rank=8", "batch.global_size=null").config
    assert config.optim.lr == 3e-4
    assert config.model.lora is not None
    assert config.model.lora.rank == 8
    assert config.batch.global_size is None
    whole = read(SOUND, "model.lora={rank: 4}", "model.lora.alpha=1", "launch.env.A=1").config
    assert whole.model.lora is not None
    assert (whole.model.lora.rank, whole.model.lora.alpha) == (4, 1.0)
    assert whole.launch.env == {"A": "1"}
    assert read(SOUND, "launch.env.A=").config.launch.env == {"A": ""}
    assert read(SOUND, "model.lora={}", "model.lora=null").config.model.lora is None


def test_text_is_taken_as_written_and_numbers_are_numbers() -> None:
    text = SOUND.replace("seed: 1", "seed: 1_000\n  name: 2026-01-01") + "launch: {env: {A: 1, B: on, C: 010}}\n"
    config = read(text, "run.name=no # [x]: y").config
    assert config.run.name == "no # [x]: y"
    assert config.run.seed == 1000
    assert config.launch.env == {"A": "1", "B": "on", "C": "010"}
    assert read(text).config.run.name == "2026-01-01"
    assert read(text, 'run.name="a\\tb"').config.run.name == "a\tb"
    assert read(text, "optim.weight_decay=1", "data.pack=no").config.data.pack is False


def test_origins() -> None:
    origins = read(SOUND, "model.lora.rank=8", "log={every: 3}").origins
    assert origins["optim.lr"] == "run.yaml:11"
    assert origins["data.train"] == "run.yaml:7"
    assert origins["model.lora.rank"] == "command line"
    assert origins["model.lora.alpha"] == "default"
    assert origins["log.every"] == "command line"
    assert origins["log.samples"] == "default"
    assert origins["validate.every"] == "default"
    assert "model.lora" not in origins
    replaced = read(SOUND, "optim={schedule: linear}")
    assert replaced.origins["optim.lr"] == "default"
    assert replaced.origins["optim.schedule"] == "command line"
    assert read().origins["model.lora"] == "default"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the section run is missing"),
        (b"- a\n", "must hold sections"),
        (b"just text\n", "must hold sections"),
        (b"run: {a\n", "run.yaml:2: this is not YAML"),
        (b"run:\n\tname: x\n", "indent with spaces"),
        (b"run: \xff\n", "not UTF-8"),
        (b"run: \x00\n", "not YAML"),
        (b"a: 1\n---\nb: 2\n", "not YAML"),
        (b"run: *x\n", "not YAML"),
        (b"run: &x {a: *x}\n", "an alias (*) refers to what it is in"),
        (b"? [a, b]\n: 1\n", "a key must be a plain word"),
        (b"<<: {a: 1}\n", "merge keys"),
        (b"run: 2001-13-45\n", "run is"),
        (b"run: !!python/object/apply:os.getcwd []\n", "run is []"),
        (b"[" * 5000, "nested too deeply"),
    ],
)
def test_files_that_are_no_run_files(content: bytes, message: str) -> None:
    Path("run.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load(Path("run.yaml"))
    assert message in str(error.value)


def test_file_that_cannot_be_read() -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: the run file cannot be read: No such file"):
        load(Path("nothing.yaml"))
    with pytest.raises(ConfigError, match="Is a directory"):
        load(Path())


def test_byte_order_mark_and_windows_lines() -> None:
    Path("run.yaml").write_bytes(b"\xef\xbb\xbf" + SOUND.replace("\n", "\r\n").encode())
    assert load(Path("run.yaml")).origins["optim.lr"] == "run.yaml:11"


def test_error_travels_between_processes() -> None:
    with pytest.raises(ConfigError) as error:
        read(SOUND, "optim.lr=x")
    assert str(copy.copy(error.value)) == str(error.value)


@given(st.text(max_size=60), st.text(max_size=20))
def test_no_input_shows_a_stack_of_frames(text: str, override: str) -> None:
    path = Path("any.yaml")
    path.write_bytes(text.encode("utf-8", errors="surrogatepass"))
    with pytest.raises(ConfigError):
        load(path, [override, f"optim.lr={override}", f"run.output_dir={override}"])


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("~/a b/out", "{home}/a b/out"),
        ("$HOME/out", "{home}/out"),
        ("${HOME}/out/", "{home}/out"),
        ("runs/x/", "{here}/runs/x"),
        ("$OUT", "{home}/from tilde"),
        ("ausgänge/名", "{here}/ausgänge/名"),
        ("$TWICE", "{here}/$HOME"),
        ("/x//y/../z", "/x/z"),
    ],
)
def test_b72_paths_are_expanded_once(
    written: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("OUT", "~/from tilde")
    monkeypatch.setenv("TWICE", "$HOME")
    absolute = expected.format(home=home, here=tmp_path)
    for loaded in (
        read(SOUND.replace("output_dir: out", f"output_dir: {written}")),
        read(SOUND, f"run.output_dir={written}"),
        read(SOUND, f'data.validation=["{written}"]', f"checkpoint.resume={written}", f"data.cache_dir={written}"),
    ):
        config = loaded.config
        if config.checkpoint.resume == "auto":
            assert config.run.output_dir == absolute
        else:
            assert config.checkpoint.resume == config.data.cache_dir == absolute
            assert config.data.validation == [absolute]
        assert config.data.train == [str(tmp_path / "train.jsonl")]
    assert not (tmp_path / "~").exists()


def test_b72_later_chdir_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = read()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert loaded.config.run.output_dir == str(tmp_path / "out")
    assert loaded.config.data.cache_dir.startswith("/")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("$NO_SUCH_VARIABLE/out", "uses $NO_SUCH_VARIABLE, which is not set"),
        ("${NO_SUCH_VARIABLE}", "uses $NO_SUCH_VARIABLE, which is not set"),
        ("~no_such_person/x", "there is no such home folder"),
        ('""', "the path is empty"),
        ('"a\\0b"', "control character"),
    ],
)
def test_b72_paths_that_cannot_be_expanded(written: str, message: str) -> None:
    text = refusal(SOUND.replace("output_dir: out", f"output_dir: {written}"))
    assert text.startswith("run.yaml:2: run.output_dir: ")
    assert message in text


def test_model_path_is_starter_a_hub_id_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "org" / "here").mkdir(parents=True)
    for written, expected in (
        ("starter", "starter"),
        ("org/name", "org/name"),
        ("gpt2", "gpt2"),
        ("org/here", str(tmp_path / "org" / "here")),
        ("./name", str(tmp_path / "name")),
        ("~/name", str(Path.home() / "name")),
        ("a/b/c", str(tmp_path / "a" / "b" / "c")),
    ):
        assert read(SOUND, f"model.path={written}").config.model.path == expected
