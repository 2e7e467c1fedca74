"""Which settings are worth a trial on this machine, and which cannot act, with the reason; no torch.

Every one of them leaves the laws of the numbers alone: the samples of an update, its loss and its step stay the same
but for rounding. What the variables of NCCL do is from NVIDIA's "NCCL User Guide", chapter "Environment Variables".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from unisono.config.check import check, check_world
from unisono.config.schema import RunConfig
from unisono.errors import ConfigError

MIB = 2**20
BUCKETS_MIB = (8, 100)
PREFETCHES = (4, 8)
LEAST_DATA_SHARE = 0.005  # of the time that ranks wait for data: no more can be gained
LIGHTER = {"none": (), "selective": ("none",), "full": ("selective", "none"), "offload": ("full", "selective", "none")}
SMALLEST_TOKENS = 64
ENV = "launch.env."
_SOCKETS = {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}
_REMOVED = {"NCCL_TREE_THRESHOLD": "2.5", "NCCL_LL_THRESHOLD": "2.5", "NCCL_SINGLE_RING_THRESHOLD": "2.3"}
_NEVER = (
    ("compressing DDP hooks (bf16, PowerSGD)", "they change the gradients, and with them the model"),
    ("torch.compile", "the run file has no key for it"),
)


@dataclass(frozen=True)
class Setting:
    """A candidate: values by dotted key, and why it may be faster."""

    changes: Mapping[str, object]
    why: str

    @property
    def name(self) -> str:
        """Say it as overrides are written."""
        return " ".join(f"{key.removeprefix(ENV)}={_word(value)}" for key, value in self.changes.items())


@dataclass(frozen=True)
class LeftOut:
    """A setting that is not tried, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Seen:
    """What a first run has shown: the strategy that ran, bytes of gradients, and the micro-batches of an update.

    ``micro_batches`` is the most that a rank had in an update, ``micro_batch_tokens`` the largest one, and
    ``data_share`` the share of the updates' time that ranks waited for data.
    """

    strategy: str
    gradient_bytes: int
    micro_batches: int
    micro_batch_tokens: int
    data_share: float


@dataclass(frozen=True)
class Situation:
    """The run file, the ranks it runs on here, what there is for them, and what the person's shell gives them."""

    config: RunConfig
    ranks: int
    gpus: int
    cores: int
    seen: Seen
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        """What the ranks' environment will say, of what people set."""
        return {**self.environment, **self.config.launch.env}


def candidates(here: Situation) -> tuple[list[Setting], list[LeftOut]]:
    """Return what is to be tried, the likeliest first, and what is not; what the run file cannot take is neither."""
    settings: list[Setting] = []
    left_out: list[LeftOut] = []
    for part in (_micro_batch, _model, _data, _strategy, _threads, _nccl):
        for each in part(here):
            if isinstance(each, LeftOut):
                left_out.append(each)
            elif _is_taken(here, each):
                settings.append(each)
    return settings, [*left_out, *(LeftOut(*each) for each in _NEVER)]


Found = Iterator[Setting | LeftOut]


def changed(config: RunConfig, changes: Mapping[str, object]) -> RunConfig:
    """Return the run file with values by dotted key; variables are added to those that are there."""
    for key, value in changes.items():
        name, _, below = key.partition(".")
        section = dict(config)[name]
        if key.startswith(ENV):
            below, value = "env", {**section.env, key.removeprefix(ENV): value}
        config = config.model_copy(update={name: section.model_copy(update={below: value})})
    return config


def _is_taken(here: Situation, setting: Setting) -> bool:
    config = changed(here.config, setting.changes)
    try:
        check(config)
        check_world(config, here.ranks)
    except ConfigError:
        return False
    known = {ENV + name: value for name, value in here.variables.items()}
    return config != here.config and any(known.get(key) != value for key, value in setting.changes.items())


def _micro_batch(here: Situation) -> Found:
    batch, seen = here.config.batch, here.seen
    larger, smaller = "fewer, larger products", "less memory, which may stay in the caches"
    more_than_one = seen.micro_batches > 1
    if batch.micro_size is not None:
        if more_than_one:
            yield Setting({"batch.micro_size": 2 * batch.micro_size}, larger)
        if batch.micro_size > 1:
            yield Setting({"batch.micro_size": batch.micro_size // 2}, smaller)
        return
    budget = batch.micro_tokens if isinstance(batch.micro_tokens, int) else _power(seen.micro_batch_tokens)
    if more_than_one:
        yield Setting({"batch.micro_tokens": 2 * budget}, larger)
        if seen.micro_batches > 2:
            yield Setting({"batch.micro_tokens": 4 * budget}, larger)
    else:
        yield LeftOut("a larger batch.micro_tokens", "a rank's whole part of an update is one micro-batch already")
    half = min(budget, _power(seen.micro_batch_tokens)) // 2
    if half >= SMALLEST_TOKENS:
        yield Setting({"batch.micro_tokens": half}, smaller)


def _model(here: Situation) -> Found:
    model = here.config.model
    other = "document" if model.attention in ("sdpa", "eager") else "sdpa"
    yield Setting({"model.attention": other}, "another way to the same attention")
    for way in LIGHTER[model.activation_checkpointing]:
        yield Setting({"model.activation_checkpointing": way}, "less is computed again, if the memory is there")


def _data(here: Situation) -> Found:
    data, waits = here.config.data, here.seen.data_share
    if not data.pack:
        yield Setting({"data.pack": True}, "no padding")
    if waits < LEAST_DATA_SHARE:
        yield LeftOut("data.prefetch", f"ranks wait for data {waits:.1%} of the time: there is nothing to gain")
        return
    for number in PREFETCHES:
        if number > data.prefetch:
            yield Setting({"data.prefetch": number}, f"ranks wait for data {waits:.1%} of the time")


def _strategy(here: Situation) -> Found:
    section, seen = here.config.strategy, here.seen
    if here.ranks == 1:
        yield LeftOut("strategy.bucket_mib", "one rank exchanges nothing")
    elif seen.strategy != "ddp":
        yield LeftOut("strategy.bucket_mib", f"strategy {seen.strategy} has no buckets")
        if section.exchange == "micro_batch":
            yield Setting({"strategy.exchange": "update"}, "fewer exchanges, if the memory is there")
    else:
        size = f"{seen.gradient_bytes / MIB:,.1f} MiB of gradients"
        for mib in BUCKETS_MIB:
            if seen.gradient_bytes <= min(mib, section.bucket_mib) * MIB:
                yield LeftOut(f"strategy.bucket_mib={mib}", f"{size} are one bucket either way")
            else:
                yield Setting({"strategy.bucket_mib": mib}, f"{size}, exchanged in other pieces")
        shares = not section.share_optimizer
        yield Setting(
            {"strategy.share_optimizer": shares}, "a share of the step each" if shares else "no second exchange"
        )


def _threads(here: Situation) -> Found:
    launch = here.config.launch
    if here.gpus:
        return
    if launch.allocator == "none":
        yield Setting({"launch.allocator": "auto"}, "an allocator that keeps freed pages")
    each = max(1, here.cores // here.ranks)
    named = here.variables.get("OMP_NUM_THREADS")
    now = launch.threads if launch.threads != "auto" else int(named) if named and named.isdecimal() else each
    for number in dict.fromkeys((each, now - 1)):
        if number > 0 and number != now:
            why = "all cores that a rank can have" if number == each else "a core left for the exchange and the data"
            yield Setting({"launch.threads": number}, why)
    if "OMP_WAIT_POLICY" not in here.variables:
        waits = f"{ENV}OMP_WAIT_POLICY"
        if now > 1:
            yield Setting({waits: "PASSIVE"}, "threads that wait leave their core to others")
        else:
            yield LeftOut("OMP_WAIT_POLICY=PASSIVE", "a rank with one thread waits for none")


def _nccl(here: Situation) -> Found:
    """Go through what tutorials set, and through what is set here."""
    for name in sorted(name for name in here.variables if name in _REMOVED):
        yield LeftOut(f"{name} (set here)", f"NCCL has ignored it since {_REMOVED[name]}")
    ring, sockets = {"NCCL_ALGO": "Ring"}, dict(_SOCKETS)
    why_not = "one rank exchanges nothing" if here.ranks == 1 else "" if here.gpus else "ranks on a CPU use gloo"
    if why_not:
        known = {*ring, *sockets, *_REMOVED}
        others = [name for name in sorted(here.variables) if name.startswith("NCCL_") and name not in known]
        for name in (*(_assigned(ring)), *(_assigned(sockets)), *(f"{each} (set here)" for each in others)):
            yield LeftOut(
                name, f"ignored: {why_not}, and only NCCL reads it" if here.ranks > 1 else f"ignored: {why_not}"
            )
        return
    yield Setting(_as_env(ring), "what tutorials set; NCCL itself chooses by size, ring for large pieces")
    if here.seen.strategy == "ddp":
        yield Setting({f"{ENV}NCCL_ALGO": "allreduce:tree"}, "fewer steps for small pieces")
    else:
        yield LeftOut("NCCL_ALGO=allreduce:tree", f"strategy {here.seen.strategy} has no all-reduce of its own")
    if here.variables.get("NCCL_P2P_DISABLE") == "1" == here.variables.get("NCCL_SHM_DISABLE"):
        yield Setting(_as_env(sockets), "more sockets a connection, at the cost of CPU time")
        return
    for name in _assigned(sockets):
        yield LeftOut(name, "ignored: it is of the socket transport, and GPUs of one machine use NVLink, PCI or memory")


def _as_env(variables: Mapping[str, str]) -> dict[str, str]:
    return {ENV + name: value for name, value in variables.items()}


def _assigned(variables: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in variables.items()]


def _power(number: int) -> int:
    """Return the next power of two."""
    return 1 << (number - 1).bit_length()


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
