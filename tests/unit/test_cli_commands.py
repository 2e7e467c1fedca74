"""The command line: mistakes end with code 2 and plain words, interrupts with 130, and help loads nothing heavy."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from support.runfile import SOUND, write_run
from unisono import cli
from unisono.errors import CheckpointError, ModelError

HEAVY = ("torch", "transformers", "peft", "numpy")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run the command line in this process; returns the exit code."""
    monkeypatch.setattr(sys, "argv", ["unisono", *words])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def stand_in(monkeypatch: pytest.MonkeyPatch, module: str, **functions: object) -> None:
    """Put a module in the place of a room that the command would import."""
    fake = types.ModuleType(module)
    for name, function in functions.items():
        setattr(fake, name, function)
    monkeypatch.setitem(sys.modules, module, fake)


def test_config_shows_values_with_origins(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "config", str(write_run(Path())), "optim.lr=1") == 0
    assert "lr: 1.0" in capsys.readouterr().out


def test_config_shows_and_then_judges(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "config", str(write_run(Path())), "batch.global_tokens=9") == 2
    output = capsys.readouterr()
    assert "global_tokens: 9" in output.out
    assert output.err.startswith("error: command line: batch.global_size 8 and batch.global_tokens 9 are both given")


def test_config_schema_needs_no_run_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "config", "--schema") == 0
    assert json.loads(capsys.readouterr().out)["additionalProperties"] is False
    assert call(monkeypatch, "config") == 2


@pytest.mark.parametrize(
    ("text", "override", "message"),
    [
        (SOUND.replace("lr: 2e-5", "learning_rte: 1.0"), "log.every=1", "run.yaml:11: optim.learning_rte is not a key"),
        (SOUND, "optim.lr", "override 'optim.lr': an override has the form section.key=value"),
        (SOUND, "batch.micro_size=3", "batch.global_size 8 does not divide"),
        (SOUND, "data.train=[no.jsonl]", "no.jsonl does not exist"),
        (SOUND, "run.output_dir=train.jsonl/out", "train.jsonl is not a folder"),
    ],
)
def test_train_refuses_mistakes_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, override: str, message: str
) -> None:
    def run(loaded: object, overrides: object) -> int:
        raise AssertionError("it must not come to this")

    stand_in(monkeypatch, "unisono.launch", run=run)
    assert call(monkeypatch, "train", str(write_run(Path(), text)), override) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: ")
    assert message in output.err
    assert "Traceback" not in output.err
    assert sorted(os.listdir()) == ["run.yaml", "train.jsonl"]


def test_b07_train_names_the_three_numbers_before_the_model_loads() -> None:
    run_file = str(write_run(Path()))
    program = (
        "import sys\nfrom unisono.cli import main\ntry:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
    )
    words = ["train", run_file, "batch.global_size=8", "batch.micro_size=3", "launch.ranks=2"]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "batch.global_size 8 does not divide into micro-batches of batch.micro_size 3 on 2 ranks" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("code", [0, 1, 2, 130, 143])
def test_train_hands_on_run_overrides_and_exit_code(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    seen: list[Any] = []

    def run(loaded: Any, overrides: Any, *, began: float) -> int:
        assert 0 < time.time() - began < 3600, "when this process began"
        seen.extend([loaded.config.optim.lr, list(overrides)])
        return code

    stand_in(monkeypatch, "unisono.launch", run=run)
    assert call(monkeypatch, "train", str(write_run(Path())), "optim.lr=0.5", "launch.ranks=2") == code
    assert seen == [0.5, ["optim.lr=0.5", "launch.ranks=2"]]


def test_the_profile_option_is_a_key_of_the_run_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    def run(loaded: Any, overrides: Any, *, began: float) -> int:
        seen.extend([loaded.config.log.profile, list(overrides)])
        return 0

    stand_in(monkeypatch, "unisono.launch", run=run)
    assert call(monkeypatch, "train", str(write_run(Path())), "--profile", "10..12") == 0
    assert seen == ["10..12", ["log.profile=10..12"]]
    assert call(monkeypatch, "train", str(write_run(Path())), "--profile", "soon") == 2
    assert 'log.profile is "soon", but it takes none, or text such as 10..12' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelError("no such model", where="model.path", hint="look again"), 2),
        (CheckpointError("it is torn"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_of_the_rooms_become_words_and_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    def generate(run: Path, prompt: str, *, max_new_tokens: int) -> str:
        raise error

    stand_in(monkeypatch, "unisono.export.generate", generate=generate)
    assert call(monkeypatch, "generate", "runs/x", "hello") == code
    text = capsys.readouterr().err
    assert "Traceback" not in text
    if code == 2:
        assert text == "error: model.path: no such model\n  hint: look again\n"


def test_unexpected_exception_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(run: Path, prompt: str, *, max_new_tokens: int) -> str:
        raise ZeroDivisionError

    stand_in(monkeypatch, "unisono.export.generate", generate=generate)
    monkeypatch.setattr(sys, "argv", ["unisono", "generate", "runs/x", "hello"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_generate_and_export_hand_on_what_was_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[object] = []

    def generate(run: Path, prompt: str, *, max_new_tokens: int) -> str:
        return f"{run} {prompt} {max_new_tokens}"

    def export(run: Path, out: Path, *, merge: bool, dtype: str | None) -> None:
        seen.append((run, out, merge, dtype))

    stand_in(monkeypatch, "unisono.export.generate", generate=generate)
    stand_in(monkeypatch, "unisono.export.export", export=export)
    assert call(monkeypatch, "generate", "runs/x", "two words", "--max-new-tokens", "5") == 0
    assert capsys.readouterr().out == "runs/x two words 5\n"
    assert call(monkeypatch, "export", "runs/x", "out", "--merge", "--dtype", "bf16") == 0
    assert call(monkeypatch, "export", "runs/x", "out") == 0
    assert seen == [(Path("runs/x"), Path("out"), True, "bf16"), (Path("runs/x"), Path("out"), False, None)]
    assert call(monkeypatch, "export", "runs/x", "out", "--dtype", "int3") == 2


def test_data_show_hands_on_what_was_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def show(data: object, folder: Path, *, trust_remote_code: bool, number: int) -> None:
        seen.append((data, folder, trust_remote_code, number))

    def prepare(config: Any, progress: object) -> object:
        return types.SimpleNamespace(data=config.data.max_length, folder=Path("/models"))

    stand_in(monkeypatch, "unisono.build", prepare=prepare)
    monkeypatch.setattr("unisono.data.show.show", show)
    assert call(monkeypatch, "data", "show", str(write_run(Path())), "data.max_length=77", "--number", "7") == 0
    assert seen == [(77, Path("/models"), False, 7)]


@pytest.mark.parametrize("words", [["no-such-command"], ["train"], ["train", "run.yaml", "--no-such-option"]])
def test_wrong_usage_is_a_mistake(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    assert call(monkeypatch, *words) == 2


def test_reader_that_leaves_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "from unisono.cli import main; main()", "config", "--schema"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert done.returncode == 1
    assert done.stderr == b""


@pytest.mark.parametrize(
    "words", [["train", "--help"], ["--version"], ["config", "run.yaml"], ["train", "run.yaml", "x=1"]]
)
def test_answers_at_once_without_anything_heavy(words: list[str]) -> None:
    write_run(Path())
    program = (
        "import sys, atexit\n"
        f"atexit.register(lambda: print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr))\n"
        "from unisono.cli import main\n"
        "main()\n"
    )
    before = os.times()
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    after = os.times()
    assert done.stderr.splitlines()[-1] == "[]"
    assert done.returncode == (2 if "x=1" in words else 0)
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    assert seconds < 2.0  # about 0.4 on an idle machine; the processor's seconds, since others may be busy


def test_interrupt_ends_with_130() -> None:
    program = (
        "import sys, time, types\n"
        "room = types.ModuleType('unisono.export.generate')\n"
        "def generate(*a, **k):\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(60)\n"
        "room.generate = generate\n"
        "sys.modules['unisono.export.generate'] = room\n"
        "from unisono.cli import main\n"
        "main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, "generate", "a", "b"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in errors


def test_a_terminal_without_the_letters_gets_them_escaped() -> None:
    code = "import sys; from unisono.cli import main; sys.argv[1:] = ['--version']\ntry: main()\nfinally: print('日本')"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert r"\u65e5\u672c" in said.stdout
