"""What keys say together, and what they say about files: judged before anything heavy is imported.

``check`` needs the run file alone, ``check_world`` the number of ranks, ``check_machine`` the GPUs that torch
sees, ``check_length`` the number of updates. Each reports every problem at once as ConfigError, with the origins of
the values where they are given. ``check_output_dir`` tries the disk.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from typing import get_args

from unisono.config.output import check_output_dir
from unisono.config.paths import is_hub_id, is_one_local_file
from unisono.config.schema import FieldName, RunConfig, profiled_updates, range_of, sources_of, validation_sets_of
from unisono.errors import ConfigError

__all__ = ["check", "check_length", "check_machine", "check_output_dir", "check_world"]

Origins = Mapping[str, str]
_DATA_SET_FILES = ("state.json", "dataset_dict.json")  # what datasets' save_to_disk writes
Problems = Iterator[tuple[str, str, str | None]]  # key, message, hint
_SET_BY_THE_LAUNCHER = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
_KEPT_FOR_LAUNCHERS = ("UNISONO_", "TORCHELASTIC_")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET = re.compile(r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|APIKEY|KEY)(?:$|_)", re.IGNORECASE)


def check(config: RunConfig, origins: Origins | None = None) -> None:
    """Judge the run file by itself. Raises ConfigError with all problems at once."""
    rules = (_batch, _length, _optim, _in_backward, _without_effect, _precision, _launch, _model, _data, _data_files)
    _raise([problem for rule in rules for problem in rule(config)], origins)


def check_world(config: RunConfig, ranks: int, origins: Origins | None = None) -> None:
    """Judge the run file for ``ranks`` processes. Raises ConfigError."""
    _raise(list(_world(config, ranks)), origins)


def check_length(config: RunConfig, updates: int, origins: Origins | None = None) -> None:
    """Judge the run file for a run of so many updates in all. Raises ConfigError."""
    _raise(list(_profile(config, updates)), origins)


def check_machine(config: RunConfig, gpus: int, origins: Origins | None = None) -> None:
    """Judge the run file for a machine with ``gpus`` visible GPUs; 0 means the CPU. Raises ConfigError."""
    if gpus == 0 and config.precision.compute == "fp16":
        message = "precision.compute is fp16, but no GPU is visible, and CPUs emulate fp16 at best"
        hint = "use precision.compute=auto (bf16 where the CPU multiplies it, else fp32)"
        _raise([("precision.compute", message, hint)], origins)


def _raise(problems: list[tuple[str, str, str | None]], origins: Origins | None) -> None:
    if problems:
        places = {key: place for key, place in (origins or {}).items() if place != "default"}
        errors = [ConfigError(text, where=places.get(key), hint=hint) for key, text, hint in problems]
        raise ConfigError.of(errors)


def _world(config: RunConfig, ranks: int) -> Problems:
    if config.strategy.name == "single" and ranks > 1:
        message = f"strategy.name is single, but there are {ranks} ranks"
        yield "strategy.name", message, "use strategy.name=ddp or launch.ranks=1"
    if config.optim.in_backward and config.strategy.name == "auto" and ranks > 1:
        message = f"optim.in_backward on {ranks} ranks needs strategy.name fsdp2: auto would be ddp"
        yield "optim.in_backward", message, "use strategy.name=fsdp2"
    shared = config.strategy.shard_ranks
    if shared is not None and ranks > 1 and ranks % shared:
        message = f"strategy.shard_ranks is {shared}, and {ranks} ranks do not divide into groups of {shared}"
        yield "strategy.shard_ranks", message, "use the number of ranks of a machine, or take the key out"
    size, micro = config.batch.global_size, config.batch.micro_size
    if size is not None and micro is not None and size % (micro * ranks):
        message = (
            f"batch.global_size {size} does not divide into micro-batches of batch.micro_size {micro}"
            f" on {ranks} rank{'s' if ranks > 1 else ''}: it must be a multiple of {micro} x {ranks} = {micro * ranks}"
        )
        yield "batch.micro_size", message, _nearest_sizes(size, micro, ranks)


def _nearest_sizes(size: int, micro: int, ranks: int) -> str:
    """Name the values nearest to what was asked for that fit together."""
    step = micro * ranks
    sizes = [str(value) for value in (size // step * step, (size // step + 1) * step) if value]
    choices = [f"batch.global_size={' or '.join(sizes)}"]
    if size % ranks == 0:
        each = size // ranks
        fits = [value for value in range(1, each + 1) if each % value == 0]
        choices.append(f"batch.micro_size={min(fits, key=lambda value: (abs(value - micro), value))}")
    return "use " + ", or ".join([*choices, "batch.micro_tokens, which always fits"])


def _batch(config: RunConfig) -> Problems:
    batch = config.batch
    if batch.global_size is None and batch.global_tokens is None:
        message = "the size of an update is not given: batch.global_size (samples) or batch.global_tokens"
        yield "batch.global_size", message, "for example batch.global_size=16"
    if batch.global_size is not None and batch.global_tokens is not None:
        both = f"batch.global_size {batch.global_size} and batch.global_tokens {batch.global_tokens}"
        yield "batch.global_tokens", f"{both} are both given", "keep one of them"
    if batch.micro_size is not None and batch.micro_tokens != "auto":
        message = f"batch.micro_size {batch.micro_size} and batch.micro_tokens {batch.micro_tokens} are both given"
        yield "batch.micro_tokens", message, "keep one of them"
    if batch.micro_size is not None and batch.global_size is None:
        message = f"batch.micro_size {batch.micro_size} needs batch.global_size, which is not given"
        yield "batch.micro_size", message, "with batch.global_tokens use batch.micro_tokens"


def _length(config: RunConfig) -> Problems:
    length, warmup = config.length, config.optim.warmup
    if length.epochs is None and length.updates is None:
        message = "the length of the run is not given: length.epochs or length.updates"
        yield "length.epochs", message, "for example length.epochs=3"
    if length.epochs is not None and length.updates is not None:
        message = f"length.epochs {length.epochs} and length.updates {length.updates} are both given"
        yield "length.updates", message, "keep one of them"
    if length.updates is not None and isinstance(warmup, int) and warmup > length.updates:
        message = f"optim.warmup is {warmup} updates, but the run has length.updates {length.updates}"
        yield "optim.warmup", message, "a share such as 0.03 fits every length"
    yield from _profile(config, length.updates)


def _profile(config: RunConfig, updates: int | None) -> Problems:
    asked = profiled_updates(config.log)
    if asked is None:
        return
    first, last = asked
    if first > last:
        yield "log.profile", f"log.profile is {first}..{last}: no update is in that range", f"{last}..{first}?"
    elif updates is not None and last > updates:
        message = f"log.profile is {first}..{last}, but the run has {updates} update{'s' if updates > 1 else ''}"
        yield "log.profile", message, f"profile updates up to {updates}"


def _optim(config: RunConfig) -> Problems:
    optim = config.optim
    if optim.name == "adamw8bit":
        yield from _needs_bitsandbytes("optim.name", optim.name)
    if optim.lr_scaling == "none":
        if optim.lr_reference_batch is not None:
            message = f"optim.lr_reference_batch {optim.lr_reference_batch} has no effect: optim.lr_scaling is none"
            yield (
                "optim.lr_reference_batch",
                message,
                "use optim.lr_scaling=linear or sqrt, or take the key out",
            )
        return
    if optim.lr_reference_batch is None:
        message = f"optim.lr_scaling {optim.lr_scaling} needs optim.lr_reference_batch, which is not given"
        yield "optim.lr_scaling", message, "name the global batch size that optim.lr was chosen for"
    if config.batch.global_size is None:
        message = f"optim.lr_scaling {optim.lr_scaling} needs batch.global_size, which is not given"
        yield "optim.lr_scaling", message, None


def _in_backward(config: RunConfig) -> Problems:
    """Refuse what has to see all gradients before any parameter moves."""
    optim = config.optim
    if not optim.in_backward:
        return
    name, compute = config.strategy.name, config.precision.compute
    for key, is_against, message, hint in (
        (
            "optim.max_grad_norm",
            optim.max_grad_norm is not None,
            f"steps before the norm of all gradients is known, and optim.max_grad_norm is {optim.max_grad_norm}",
            "use optim.max_grad_norm=null, or take optim.in_backward out",
        ),
        (
            "optim.on_nonfinite",
            optim.on_nonfinite != "stop",
            f"has stepped when a bad gradient is found, which optim.on_nonfinite {optim.on_nonfinite} would leave out",
            "use optim.on_nonfinite=stop, or take optim.in_backward out",
        ),
        ("precision.compute", compute == "fp16", "cannot wait for the loss scale of fp16", "use bf16 or fp32"),
        (
            "strategy.name",
            name == "ddp",
            "does not go with ddp, which sums whole gradients in buckets that stay",
            "use strategy.name=fsdp2, or strategy.share_optimizer without optim.in_backward",
        ),
        (
            "strategy.cpu_offload",
            config.strategy.cpu_offload,
            "does not go with strategy.cpu_offload, whose gradients are on their way to the host then",
            "take one of them out",
        ),
    ):
        if is_against:
            yield key, f"optim.in_backward {message}", hint


def _without_effect(config: RunConfig) -> Problems:
    """Refuse values that were changed from their default and cannot take effect."""
    data, optim = config.data, config.optim
    no_validation = data.validation in (0.0, [], {})
    for key, useless, needs in (
        ("optim.momentum", optim.name != "sgd", "optim.name sgd"),
        ("optim.betas", optim.name == "sgd", "optim.name adamw"),
        ("optim.eps", optim.name == "sgd", "optim.name adamw"),
        ("optim.max_nonfinite", optim.on_nonfinite == "stop", "optim.on_nonfinite skip or rewind"),
        ("data.max_skipped", data.on_error != "skip", "data.on_error skip"),
        ("validate.every", no_validation, "data.validation, a share or files"),
        ("validate.generate", no_validation, "data.validation, a share or files"),
        ("validate.max_new_tokens", config.validation.generate == 0, "validate.generate"),
        ("data.shuffle_window", data.mode != "stream", "data.mode stream"),
        ("data.shuffle_window", not data.shuffle, "data.shuffle true"),
        ("strategy.bucket_mib", config.strategy.name in ("single", "fsdp2"), "strategy.name ddp"),
        ("strategy.exchange", config.strategy.name != "fsdp2", "strategy.name fsdp2"),
        ("strategy.shard_ranks", config.strategy.name != "fsdp2", "strategy.name fsdp2"),
        ("strategy.cpu_offload", config.strategy.name != "fsdp2", "strategy.name fsdp2"),
        ("strategy.reshard_after_forward", config.strategy.name != "fsdp2", "strategy.name fsdp2"),
        ("strategy.share_optimizer", config.strategy.name in ("single", "fsdp2"), "strategy.name ddp"),
    ):
        section = config.validation if key.startswith("validate.") else dict(config)[key.partition(".")[0]]
        name = key.partition(".")[2]
        value, default = dict(section)[name], type(section).model_fields[name].default
        if useless and value != default:
            yield key, f"{key} {value} has no effect: it needs {needs}", "take the key out"


def _precision(config: RunConfig) -> Problems:
    compute, weights = config.precision.compute, config.precision.weights
    if weights == "bf16" and compute in ("fp32", "fp16"):
        message = f"precision.weights bf16 cannot be computed in precision.compute {compute}"
        yield "precision.weights", message, "use precision.compute=bf16, or leave the weights in fp32"
    if compute == "fp16" and config.strategy.cpu_offload:
        message = (
            "strategy.cpu_offload does not go with precision.compute fp16: its loss scale needs gradients on the GPU"
        )
        yield "strategy.cpu_offload", message, "use precision.compute=bf16 or fp32"


def _launch(config: RunConfig) -> Problems:
    ranks = config.launch.ranks
    choice = range_of(ranks)
    if choice is not None and choice[0] > choice[1]:
        yield "launch.ranks", f"launch.ranks is {ranks}: no number is in that range", f"{choice[1]}-{choice[0]}?"
    for number in range(choice[0], choice[1] + 1) if choice is not None else [1 if isinstance(ranks, str) else ranks]:
        yield from _world(config, number)
    for name in sorted(config.launch.env):
        yield from _variable(config, name)


def _variable(config: RunConfig, name: str) -> Problems:
    """Judge one variable of ``launch.env``, which is kept in the run folder as it stands."""
    key = f"launch.env.{name}"
    if not _VARIABLE.fullmatch(name):
        message = f"launch.env has {name!r}, but a variable's name is made of letters, digits and _"
        yield "launch.env", message, None
    elif name in _SET_BY_THE_LAUNCHER or name.startswith(_KEPT_FOR_LAUNCHERS):
        yield "launch.env", f"{key} is set by the launcher itself", "take it out"
    elif _SECRET.search(name):
        message = f"{key} looks like a secret, and the run folder keeps what stands in the run file"
        yield "launch.env", message, f"export {name} in your shell instead: the ranks inherit it"
    elif name == "OMP_NUM_THREADS" and config.launch.threads != "auto":
        message = f"{key} {config.launch.env[name]} and launch.threads {config.launch.threads} are both given"
        yield "launch.threads", message, "keep one of them"


def _model(config: RunConfig) -> Problems:
    path, lora = config.model.path, config.model.lora
    if path != "starter" and not is_hub_id(path):
        yield from _folder("model.path", path)
    if config.model.quantize != "none":
        yield from _quantized(config)
    if lora is not None and lora.targets == []:
        yield "model.lora.targets", "model.lora.targets is empty: nothing would be trained", "use all-linear"
    if config.checkpoint.resume not in ("auto", "never"):
        yield from _folder("checkpoint.resume", config.checkpoint.resume)


def _quantized(config: RunConfig) -> Problems:
    kind = config.model.quantize
    if config.model.lora is None:
        message = f"model.quantize {kind} keeps weights in 4 bits, which cannot be trained, and model.lora is not given"
        yield "model.quantize", message, "train adapters on them: model.lora={}"
    yield from _needs_bitsandbytes("model.quantize", kind)


def _needs_bitsandbytes(key: str, value: str) -> Problems:
    if importlib.util.find_spec("bitsandbytes") is None:
        message = f"{key} {value} needs bitsandbytes, which is not installed"
        yield key, message, "pip install 'unisono[quantize]'"


def _folder(key: str, path: str) -> Problems:
    if not os.path.isdir(path):
        what = "is not a folder" if os.path.lexists(path) else "does not exist"
        yield key, f"{key}: {path} {what}", None


def _data_files(config: RunConfig) -> Problems:
    """Find every data file that cannot be read, and files that are both learned and measured.

    Patterns, URLs and data sets are resolved when the data is prepared.
    """
    train, validation = sources_of(config.data), validation_sets_of(config.data)
    for key, sets in (("data.train", train), ("data.validation", validation)):
        for name, path in ((name, path) for name, files in sets.items() for path in files):
            if is_one_local_file(path) and (reason := _unreadable(path)):
                yield key, f"{key}{name and f'.{name}'}: {path} {reason}", None
    learned = {path for files in train.values() for path in files}
    for path in sorted(learned & {path for files in validation.values() for path in files}):
        message = f"{path} is in data.train and in data.validation: the validation loss would mean nothing"
        yield "data.validation", message, "use other files, or a share such as data.validation=0.02"


def _data(config: RunConfig) -> Problems:
    data = config.data
    sources = sources_of(data)
    for name in data.weights:
        if name not in sources:
            names = ", ".join(filter(None, sources)) or "none: data.train is one list of files"
            yield (
                "data.weights",
                f"data.weights names {name!r}, but the sources of data.train are {names}",
                None,
            )
    for name in data.fields:
        if name not in (known := get_args(FieldName)):
            near = difflib.get_close_matches(name, known, n=1)
            yield (
                "data.fields",
                f"data.fields names {name!r}, which is no field: {', '.join(known)} are",
                f"did you mean {near[0]}?" if near else "our name comes first: {prompt: question, completion: answer}",
            )
    if data.overlong == "split" and data.format not in ("auto", "text"):
        message = f"data.overlong split cuts plain texts, and data.format is {data.format}"
        yield "data.overlong", message, "use drop, truncate_prompt or error"
    is_share = isinstance(data.validation, float) and data.validation > 0
    if "all" in (sources if is_share else validation_sets_of(data)):
        key = "data.train" if is_share else "data.validation"
        message = f"{key} has a part named all, a name that the validation of all sets together goes by"
        yield key, message, "give it another name"
    if data.mode == "stream":
        yield from _stream(config)
    if config.validation.generate and config.strategy.name == "fsdp2":
        message = f"validate.generate {config.validation.generate} needs the whole model on a rank, not fsdp2's parts"
        yield "validate.generate", message, "use strategy.name=ddp, or generate after the run: unisono generate"


def _stream(config: RunConfig) -> Problems:
    """Refuse what only data that was prepared beforehand can give."""
    data = config.data
    for key, is_asked, message, hint in (
        ("length.epochs", config.length.epochs is not None, "needs the number of samples", "use length.updates"),
        (
            "data.validation",
            isinstance(data.validation, float) and data.validation > 0,
            "as a share needs the whole data",
            "name files for validation",
        ),
        ("data.weights", bool(data.weights), "need the sizes of the sources", "use data.mode=store"),
        ("batch.global_tokens", config.batch.global_tokens is not None, "needs all lengths", "use batch.global_size"),
    ):
        if is_asked:
            yield key, f"{key} {message}, which a stream does not know (data.mode stream)", hint


def _unreadable(path: str) -> str | None:
    if not os.path.lexists(path):
        return "does not exist"
    if not os.path.exists(path):
        return f"is a link to {os.readlink(path)}, which does not exist"
    if os.path.isdir(path):
        is_data_set = any(os.path.isfile(os.path.join(path, name)) for name in _DATA_SET_FILES)
        return None if is_data_set else "is a folder, and no saved Hugging Face data set"
    if not os.path.isfile(path):
        return "is not a regular file"
    return None if os.access(path, os.R_OK) else "cannot be read (permissions)"
