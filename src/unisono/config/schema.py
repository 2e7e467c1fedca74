"""The run file, as types. Closed: a key that is not here is an error, never ignored.

Only shapes and ranges of single values live here. What two keys say together is judged in ``check.py``;
where a value came from is kept by ``load.py``.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Targets = Literal["assistant", "last", "all"]
WhenOverlong = Literal["drop", "truncate_prompt", "split", "error"]
UPDATES = r"^[1-9][0-9]*\.\.[1-9][0-9]*$"
# What we call the fields of a record and of a message: what ``data.fields`` may map.
FieldName = Literal[
    "messages", "conversations", "tools", "role", "content", "from", "value",
    "instruction", "input", "output", "prompt", "completion", "text",
]  # fmt: skip


def _as_checkpointing(value: object) -> object:
    """Take yes and no as well: the knob is a switch elsewhere."""
    return {True: "full", False: "none"}.get(value, value) if isinstance(value, bool) else value


class Section(BaseModel):
    """One section of the run file: frozen, closed, strict about types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class RunSection(Section):
    """Name, place and seed of the run."""

    name: str = Field(default="run", description="name of the run, shown in logs and trackers")
    output_dir: str = Field(description="the run folder; ~ and $VARIABLES are expanded once")
    seed: int = Field(default=0, ge=0, lt=2**63, description="everything random follows from it")


class LoraSection(Section):
    """Low-rank adapters (peft)."""

    rank: PositiveInt = Field(default=16, description="rank of the adapters")
    alpha: PositiveFloat = Field(default=32.0, description="scale: the update is alpha / rank times the product")
    dropout: Share = Field(default=0.0, description="dropout on the adapter's input")
    targets: Literal["all-linear"] | list[str] = Field(
        default="all-linear", description="module names, or all linear layers but the output head"
    )


class ModelSection(Section):
    """Which model, and what of it is trained."""

    path: str = Field(description="'starter', a local folder, or a hub id")
    attention: Literal["auto", "document", "sdpa", "eager"] = Field(
        default="auto", description="auto = document: exact per document, no mask of tokens x tokens"
    )
    lora: LoraSection | None = Field(default=None, description="train adapters only; absent = full fine-tuning")
    quantize: Literal["none", "nf4"] = Field(
        default="none", description="nf4 = frozen weights in 4 bits (QLoRA): a seventh of the memory, rounded weights"
    )
    activation_checkpointing: Annotated[
        Literal["none", "selective", "full", "offload"], BeforeValidator(_as_checkpointing)
    ] = Field(
        default="none",
        description="what backward computes again: nothing; all but products and attention; whole blocks (also true); "
        "offload = whole blocks, whose inputs wait in host memory",
    )
    trust_remote_code: bool = Field(default=False, description="run Python code that comes with the model")


class DataSection(Section):
    """Where the samples come from and how they are shaped."""

    train: (
        Annotated[list[str], Field(min_length=1)]
        | Annotated[dict[Name, Annotated[list[str], Field(min_length=1)]], Field(min_length=1)]
    ) = Field(description="files (patterns, URLs and data set folders too), or several sources: a name with files each")
    weights: dict[Name, PositiveFloat] = Field(
        default={}, description="by source: how often each of its samples is seen in an epoch; 1 where none is given"
    )
    validation: Share | list[str] | dict[Name, Annotated[list[str], Field(min_length=1)]] = Field(
        default=0.0, description="share of the training records (chosen by their content), or files, or named sets"
    )
    mode: Literal["store", "stream"] = Field(
        default="store", description="store = tokens are prepared once; stream = read while training, nothing is kept"
    )
    format: Literal["auto", "messages", "conversations", "instruction", "prompt_completion", "text"] = Field(
        default="auto", description="shape of the records; auto = recognised from each source's first one and stated"
    )
    fields: dict[str, str] = Field(
        default={}, description="what the files call a field, by our name: {prompt: question, completion: answer}"
    )
    targets: Targets = Field(
        default="assistant", description="what is learned: every answer, the last one, or every token"
    )
    max_length: PositiveInt | Literal["auto"] = Field(
        default="auto", description="tokens per sample; auto = the model's context"
    )
    overlong: WhenOverlong = Field(
        default="drop",
        description="a longer sample: left out, its prompt cut from the start, a plain text cut in pieces, an error",
    )
    on_error: Literal["stop", "skip"] = Field(
        default="stop", description="what to do with a record that cannot be used"
    )
    max_skipped: Annotated[int, Field(ge=0)] = Field(
        default=100, description="with skip: more bad records than this stop the run"
    )
    shuffle: bool = Field(default=True, description="a new order each epoch, from the seed")
    pack: bool = Field(default=True, description="several documents in one row, each attending to itself only")
    shuffle_window: PositiveInt = Field(
        default=10_000, description="stream: records that are shuffled among themselves"
    )
    prefetch: Annotated[int, Field(ge=0, le=64)] = Field(default=2, description="updates whose batches are built ahead")
    cache_dir: str = Field(default="~/.cache/unisono", description="where prepared tokens are kept")


class BatchSection(Section):
    """How much data goes into one update, and how much of it is in memory at a time."""

    global_size: PositiveInt | None = Field(default=None, description="samples per update, over all ranks")
    global_tokens: PositiveInt | None = Field(default=None, description="or: tokens per update, over all ranks")
    micro_tokens: PositiveInt | Literal["auto"] = Field(
        default="auto", description="tokens of one micro-batch; a memory knob"
    )
    micro_size: PositiveInt | None = Field(
        default=None, description="or: samples of one micro-batch; must divide evenly"
    )


class OptimSection(Section):
    """The optimizer and its rate, a pure function of the update."""

    name: Literal["adamw", "adamw8bit", "adamw_bf16", "sgd"] = Field(
        default="adamw",
        description="optimizer; adamw8bit = moments in 8 bits (bitsandbytes): a quarter, and rounded; "
        "adamw_bf16 = moments in bf16, rounded at random so that their mean stays",
    )
    lr: PositiveFloat = Field(default=2e-5, description="peak learning rate")
    schedule: Literal["constant", "linear", "cosine"] = Field(default="cosine", description="shape after the warm-up")
    warmup: Annotated[int, Field(ge=0)] | Share = Field(default=0.03, description="updates, or share of all updates")
    weight_decay: NonNegativeFloat = Field(
        default=0.0, description="decoupled decay of matrices (not norms, not biases)"
    )
    betas: tuple[Share, Share] = Field(default=(0.9, 0.999), description="AdamW's moment decay rates")
    eps: PositiveFloat = Field(default=1e-8, description="AdamW's denominator term")
    momentum: Share = Field(default=0.0, description="SGD's momentum")
    max_grad_norm: PositiveFloat | None = Field(
        default=1.0, description="clip the global gradient norm to this; null = never"
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(default="none", description="scale lr by the global batch")
    lr_reference_batch: PositiveInt | None = Field(default=None, description="the global batch that lr was chosen for")
    on_nonfinite: Literal["stop", "skip", "rewind"] = Field(
        default="stop",
        description="what all ranks do when loss or gradient is not finite; rewind = go back to a checkpoint and leave "
        "out what came since",
    )
    in_backward: bool = Field(
        default=False,
        description="step each parameter within backward and let its gradient go: no gradients are kept, and no norm "
        "of all is known before; single and fsdp2",
    )
    max_nonfinite: PositiveInt = Field(
        default=3, description="this many bad updates in a row: with skip they stop the run, with rewind it goes back"
    )
    skip_updates: list[PositiveInt] = Field(default=[], description="updates to leave out, such as a poisonous batch")


class LengthSection(Section):
    """How long to train: epochs or updates."""

    epochs: PositiveInt | None = Field(default=None, description="passes over the data")
    updates: PositiveInt | None = Field(default=None, description="optimizer updates")


class PrecisionSection(Section):
    """Number formats."""

    compute: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto", description="auto = bf16 where the hardware multiplies it, else fp32"
    )
    weights: Literal["fp32", "bf16"] = Field(
        default="fp32", description="how weights are kept; bf16 loses small updates"
    )


class StrategySection(Section):
    """How ranks share the work."""

    name: Literal["auto", "single", "ddp", "fsdp2"] = Field(
        default="auto",
        description="auto = single for one rank, else ddp; fsdp2 = every rank keeps its part of the model",
    )
    share_optimizer: bool = Field(
        default=False,
        description="ddp: each rank keeps the optimizer's state of its share of the parameters (ZeRO-1); the same bits",
    )
    exchange: Literal["update", "micro_batch"] = Field(
        default="update",
        description="fsdp2: exchange gradients once an update, or after each micro-batch: slower, none is kept whole",
    )
    shard_ranks: Annotated[int, Field(ge=2)] | None = Field(
        default=None,
        description="fsdp2: so many neighbouring ranks share one copy of the model (hybrid: those of a machine); "
        "null = all ranks do",
    )
    reshard_after_forward: bool = Field(
        default=True,
        description="fsdp2: give a block's weights back after forward and gather them again for backward; false = keep "
        "them: one exchange less, and the memory of all blocks' weights",
    )
    cpu_offload: bool = Field(
        default=False,
        description="fsdp2: parts of weights, gradients and moments wait in host memory, and the optimizer steps there",
    )
    bucket_mib: PositiveInt = Field(default=25, description="ddp: MiB of gradients exchanged in one piece")
    unused_parameters: Literal["refuse", "zero"] = Field(
        default="refuse", description="a parameter without gradient on some rank: an error, or a zero"
    )


class CheckpointSection(Section):
    """When to save, what to keep, what to go on from."""

    every: PositiveInt | Literal["auto"] = Field(
        default="auto", description="updates between saves; auto = by what a save costs, at most five minutes apart"
    )
    mode: Literal["background", "wait"] = Field(
        default="background", description="background = copy, then write while training goes on; wait = write first"
    )
    keep: PositiveInt = Field(default=3, description="newest checkpoints kept; the best one is kept besides")
    allow_changes: list[str] = Field(default=[], description="settings that may differ from the checkpoint's, by name")
    resume: str = Field(default="auto", description="auto = newest sound one in the run folder, never, or a folder")


class ValidateSection(Section):
    """When to measure the validation loss, and on how many samples to let the model answer."""

    every: PositiveInt | None = Field(default=None, description="updates between validations; always once at the end")
    generate: Annotated[int, Field(ge=0)] = Field(
        default=0, description="validation samples whose last answer is generated and compared; the texts are kept"
    )
    max_new_tokens: PositiveInt = Field(default=256, description="tokens of a generated answer at most")


class LogSection(Section):
    """What is written while training."""

    every: PositiveInt = Field(default=1, description="updates between lines on the terminal; metrics.jsonl has all")
    trackers: list[Literal["tensorboard"]] = Field(default=[], description="besides metrics.jsonl")
    samples: bool = Field(default=False, description="write the sample ids of every update to samples.jsonl")
    profile: Literal["none"] | Annotated[str, Field(pattern=UPDATES, examples=["10..12"])] = Field(
        default="none", description="trace these updates with torch's profiler: 10..12; --profile 10..12 does the same"
    )


class LaunchSection(Section):
    """How the processes are started."""

    ranks: PositiveInt | Literal["auto"] | Annotated[str, Field(pattern=r"^[1-9][0-9]*-[1-9][0-9]*$")] = Field(
        default="auto",
        description="processes; auto = GPUs, or on CPU one per two cores; 1-4 = as many of these as there is room for",
    )
    max_restarts: Annotated[int, Field(ge=0)] = Field(
        default=3, description="restarts after a fault, without any progress between them"
    )
    port: Annotated[int, Field(ge=0, le=65535)] = Field(default=0, description="rendezvous port; 0 = any free one")
    threads: PositiveInt | Literal["auto"] = Field(
        default="auto", description="CPU threads of a rank; auto = usable cores / ranks"
    )
    hang_seconds: PositiveFloat = Field(
        default=120.0,
        description="silence that is a hang, if also ten times longer than before; at first ten times this",
    )
    grace_seconds: PositiveFloat = Field(
        default=120.0, description="ranks that have not saved so long after a request to stop are killed"
    )
    timeout_seconds: PositiveInt = Field(default=600, description="a collective that takes longer has failed")
    allocator: Literal["auto", "none"] = Field(
        default="auto", description="CPU: preload tcmalloc or mimalloc if one is present"
    )
    env: dict[str, str] = Field(default={}, description="variables for every rank, such as NCCL_ALGO; no secrets")


class RunConfig(Section):
    """The whole run file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)

    run: RunSection
    model: ModelSection
    data: DataSection
    batch: BatchSection
    optim: OptimSection = OptimSection()
    length: LengthSection
    precision: PrecisionSection = PrecisionSection()
    strategy: StrategySection = StrategySection()
    checkpoint: CheckpointSection = CheckpointSection()
    validation: ValidateSection = Field(default=ValidateSection(), alias="validate")
    log: LogSection = LogSection()
    launch: LaunchSection = LaunchSection()


def sources_of(data: DataSection) -> dict[str, list[str]]:
    """Give the training files by source; the only source of a plain list has the empty name."""
    return data.train if isinstance(data.train, dict) else {"": data.train}


def range_of(ranks: int | str) -> tuple[int, int] | None:
    """Give the fewest and the most ranks of a range such as 1-4; None where it is a number, or auto."""
    if isinstance(ranks, int) or ranks == "auto":
        return None
    fewest, _, most = ranks.partition("-")
    return int(fewest), int(most)


def profiled_updates(log: LogSection) -> tuple[int, int] | None:
    """Give the first and the last update that are profiled; None for none."""
    if log.profile == "none":
        return None
    first, _, last = log.profile.partition("..")
    return int(first), int(last)


def validation_sets_of(data: DataSection) -> dict[str, list[str]]:
    """Give the validation files by set; the only set of a plain list has the empty name. Empty for a share."""
    if isinstance(data.validation, dict):
        return data.validation
    return {"": data.validation} if isinstance(data.validation, list) and data.validation else {}
