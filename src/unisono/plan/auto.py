"""What a run does about the keys that were left to it: the planner's answer for the devices that are there.

Open are ``strategy.name: auto`` (with it, what ddp shares out and when fsdp2 exchanges), ``batch.micro_tokens: auto``
and, beside one of them, ``model.activation_checkpointing`` where the person did not name it. What is named stays as it
is. The result of a run does not depend on any of them (law 6), so that another answer after a restart does no harm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from unisono.config.check import check
from unisono.config.schema import RunConfig
from unisono.errors import ConfigError
from unisono.plan.architecture import Architecture
from unisono.plan.fit import EVERY_WAY, Choice, advice, choices
from unisono.plan.hardware import GIB, Device
from unisono.plan.memory import Load

GPU_TOKENS, CPU_TOKENS = 8192, 2048  # of a micro-batch, as ever (build.py); a larger one gains nothing
LEAST_TOKENS = 64
# A plainer way counts as equally fast: the planner's seconds are no truer than that.
EQUAL = 0.10


@dataclass(frozen=True)
class Decision:
    """Values for what was open, by dotted key, and what to say about it."""

    values: Mapping[str, str | int | bool]
    line: str | None = None

    def applied(self, config: RunConfig) -> RunConfig:
        """Return the run file with these values."""
        for key, value in self.values.items():
            section, name = key.split(".")
            changed = dict(config)[section].model_copy(update={name: value})
            config = config.model_copy(update={section: changed})
        return config

    @property
    def overrides(self) -> tuple[str, ...]:
        """Say them as overrides of a command line."""
        return tuple(f"{key}={str(value).lower()}" for key, value in self.values.items())


def decide(
    config: RunConfig, origins: Mapping[str, str], shape: Architecture, device: Device, ranks: int, longest: int
) -> Decision:
    """Decide for ``ranks`` ranks on such devices, whose longest sample has ``longest`` tokens.

    The usual way (ddp, or single; a micro-batch of 8,192 tokens on a GPU, of 2,048 on a CPU) is kept wherever it fits,
    unless another one is faster by more than the planner's seconds are worth; that is asked on GPUs only.
    Raises ConfigError if nothing fits, unless nothing was open: then it warns.
    """
    named = {key for key, origin in origins.items() if origin != "default"}
    config = config.model_copy(update={"data": config.data.model_copy(update={"max_length": longest})})
    usual = _usual(config, shape, device, ranks, longest)
    if config.strategy.name != "auto" and not _sizes_are_open(config):
        return Decision({}, None if usual.fits else f"warning: the plan is {_of(usual)} a rank: it may not fit")
    if usual.fits and not device.is_gpu:
        return Decision({})
    found = [choice for choice in _every(config, shape, device, ranks, longest) if _keeps(choice, config, named)]
    fitting = [choice for choice in found if choice.fits]
    if not fitting:
        smallest = min([usual, *found], key=lambda choice: choice.peak.total)
        raise ConfigError(
            f"no way to run this fits: the smallest ({', '.join(smallest.overrides)}) takes {_of(smallest)} a rank",
            where="strategy.name",
            hint="\n        ".join(line.strip() for line in list(advice(smallest, config))[1:]),
        )
    fastest = max(choice.seconds.tokens_per_second if choice.seconds else 0.0 for choice in fitting)
    best = min(fitting, key=lambda choice: _cost(choice, fastest))
    if _values(best, config, usual) == {} or best.load == usual.load:
        return Decision({}, f"auto: {_words(usual)}: {_of(usual)} planned" if device.is_gpu else None)
    why = f"{_words(usual)} {'is slower' if usual.fits else f'does not fit ({_of(usual)})'}"
    return Decision(_values(best, config, usual), f"auto: {why}; {_words(best)}: {_of(best)} planned")


def _cost(choice: Choice, fastest: float) -> tuple[bool, int, bool, bool, bool, bool, bool, int]:
    """Order: nearly the fastest, then the plainest, then the fullest micro-batch."""
    load, speed = choice.load, choice.seconds.tokens_per_second if choice.seconds else fastest
    is_slow = speed < (1 - EQUAL) * fastest
    return (
        is_slow,
        EVERY_WAY.index(load.recompute),
        load.is_sharded,
        load.cpu_offload,
        load.keeps_gathered,
        load.share_optimizer,
        load.exchanges_always,
        -load.tokens,
    )


def _usual(config: RunConfig, shape: Architecture, device: Device, ranks: int, longest: int) -> Choice:
    """Judge what a run does that asks no planner."""
    section, tokens = config.strategy, GPU_TOKENS if device.is_gpu else CPU_TOKENS
    name = "single" if ranks == 1 else "ddp" if section.name == "auto" else section.name
    found = choices(_sized(config, ranks, longest, tokens), shape, device, ranks)
    return next(choice for choice in found if choice.load.strategy == name and not _changes(choice.load, config))


def _changes(load: Load, config: RunConfig) -> dict[str, str | bool]:
    """Return what a load does otherwise than the run file says, by dotted key; not its strategy and micro-batch."""
    does: dict[str, str | bool] = {"model.activation_checkpointing": load.recompute}
    if load.strategy == "ddp":
        does["strategy.share_optimizer"] = load.share_optimizer
    if load.strategy == "fsdp2":
        does["strategy.exchange"] = "micro_batch" if load.exchanges_always else "update"
        does["strategy.cpu_offload"] = load.cpu_offload
        does["strategy.reshard_after_forward"] = not load.keeps_gathered
    values = config.model_dump()
    says = {f"{section}.{key}": value for section in ("model", "strategy") for key, value in values[section].items()}
    return {key: value for key, value in does.items() if value != says[key]}


def _every(config: RunConfig, shape: Architecture, device: Device, ranks: int, longest: int) -> Iterator[Choice]:
    """Judge everything that is open, with micro-batches from the usual size down to one sample."""
    tokens = GPU_TOKENS if device.is_gpu else CPU_TOKENS
    while True:
        yield from choices(_sized(config, ranks, longest, tokens), shape, device, ranks)
        if tokens <= max(longest, LEAST_TOKENS) or not _sizes_are_open(config):
            return
        tokens = max(tokens // 2, longest)


def _sizes_are_open(config: RunConfig) -> bool:
    return config.batch.micro_tokens == "auto" and config.batch.micro_size is None


def _sized(config: RunConfig, ranks: int, longest: int, tokens: int) -> RunConfig:
    """Give the micro-batch a size, if it is open: no more than a rank's share of an update fills."""
    if not _sizes_are_open(config):
        return config
    batch = config.batch
    share = batch.global_size * longest if batch.global_size is not None else batch.global_tokens or tokens
    most = max(longest, min(tokens, -(-share // ranks)))
    return config.model_copy(update={"batch": batch.model_copy(update={"micro_tokens": most})})


def _keeps(choice: Choice, config: RunConfig, named: set[str]) -> bool:
    """Tell whether a choice leaves what was named as it is, and the run file as a whole allows it."""
    if named & set(_changes(choice.load, config)):
        return False
    try:
        check(Decision(_values(choice, config)).applied(config))
    except ConfigError:
        return False
    return True


def _values(choice: Choice, config: RunConfig, usual: Choice | None = None) -> dict[str, str | int | bool]:
    """Return the values that make a choice, of what was open; the micro-batch where it is not the usual one."""
    load, values = choice.load, dict[str, str | int | bool]()
    if config.strategy.name == "auto" and load.strategy not in ("single", usual and usual.load.strategy):
        values["strategy.name"] = load.strategy
    values |= _changes(load, config)
    if _sizes_are_open(config) and (usual is None or load.tokens != usual.load.tokens):
        values["batch.micro_tokens"] = load.tokens
    return values


def _words(choice: Choice) -> str:
    load = choice.load
    extras = [
        *(["its optimizer shared out"] if load.share_optimizer else []),
        *(["exchanging after each micro-batch"] if load.exchanges_always else []),
        *(["its parts in host memory"] if load.cpu_offload else []),
        *(["weights kept until backward"] if load.keeps_gathered else []),
        *([f"{load.recompute} activation checkpointing"] if load.checkpointing else []),
        f"micro-batches of {len(load.documents)} x {load.documents[0]:,} tokens",
    ]
    return ", ".join([load.strategy, *extras])


def _of(choice: Choice) -> str:
    return f"{choice.peak.total / GIB:.1f} of {choice.room_bytes / GIB:.1f} GiB"
