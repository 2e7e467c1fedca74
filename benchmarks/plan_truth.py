"""Compare the planner's bytes with what real steps allocate: every tensor's storage is counted while it lives.

python benchmarks/plan_truth.py [--only TEXT] [--write FILE]   (make plan-truth)

Each setting takes two real updates on the CPU through the lines that a run takes: load, strategy, step, optimizer. The
peak is that of the second update, when the optimizer has its state. Several ranks are processes with gloo. On a machine
with GPUs it is their allocator's peak that counts, and settings with more ranks than GPUs are left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from unisono.config.schema import OptimSection
from unisono.plan.architecture import architecture_of
from unisono.plan.fit import moment_bytes, step_bytes
from unisono.plan.memory import RESERVE, Load, Moment, peak

MIB = 2**20
PEAK = "peak: "  # how a rank's answer begins
MEDIAN, WORST = 0.05, 0.10  # what the planner promises


@dataclass(frozen=True)
class Setting:
    """One step to measure: a model's shape, what is trained, and how much a micro-batch holds."""

    name: str
    documents: tuple[int, ...]  # lengths, in one packed row
    compute: str = "fp32"
    weights: str = "fp32"
    lora: int | None = None
    lora_targets: str | list[str] = "all-linear"
    dropout: float = 0.0  # of the adapters
    quantize: str = "none"
    recompute: str = "none"
    strategy: str = "single"
    ranks: int = 1
    share_optimizer: bool = False
    optimizer: str = "adamw"
    num_micro: int = 1
    exchange: str = "update"
    shard_ranks: int | None = None
    in_backward: bool = False
    keeps_gathered: bool = False
    shape: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return sum(self.documents)

    @property
    def targets(self) -> int:
        """Half of them, as with questions and answers."""
        return self.tokens // 2


SHAPE = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 8000, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip


class Live(TorchDispatchMode):
    """Counts the bytes of living storages, and the most that there were."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> Live:
        """Count; also what fsdp2 does to storages behind the dispatcher's back."""
        live = self

        def resize(storage: Any, size: int) -> Any:
            result = live._resize(storage, size)
            if storage._cdata in live._sizes:
                live._set(storage._cdata, size)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: object) -> None:
        """Count no more."""
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def _set(self, place: int, size: int) -> None:
        self.bytes += size - self._sizes.pop(place, 0)
        if size or place in self._known:
            self._sizes[place] = size
        self.peak = max(self.peak, self.bytes)

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage, once."""
        if isinstance(tensor, DTensor):
            tensor = tensor._local_tensor
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        place, size = storage._cdata, storage.nbytes()
        known = self._known.get(place)
        if size and (known is None or known() is None):

            def gone(_: Any) -> None:
                self._known.pop(place, None)
                self._set(place, 0)

            self._known[place] = weakref.ref(storage, gone)
            self._set(place, size)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it made."""
        result = func(*args, **(kwargs or {}))
        for each in tree_iter(result):
            if isinstance(each, torch.Tensor):
                self.add(each)
        return result


class Batch:
    """A micro-batch of one packed row."""

    def __init__(self, setting: Setting, vocabulary: int) -> None:
        torch.manual_seed(0)
        tokens = setting.tokens
        self._inputs = {
            "input_ids": torch.randint(0, vocabulary, (1, tokens)),
            "position_ids": torch.cat([torch.arange(length) for length in setting.documents])[None],
            "predictors": torch.arange(setting.targets),
            "target_ids": torch.randint(0, vocabulary, (setting.targets,)),
            "document_lengths": setting.documents,
        }

    def inputs(self, device: torch.device) -> dict[str, object]:
        """Return the arguments of forward."""
        return {n: each.to(device) if isinstance(each, torch.Tensor) else each for n, each in self._inputs.items()}


def model_folder(shape: dict[str, Any], where: Path) -> Path:
    """Write a Llama with random weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    folder = where / str(abs(hash(json.dumps(shape, sort_keys=True))))
    if not folder.exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(LlamaConfig(**shape)).save_pretrained(folder)
    return folder


def measure(setting: Setting, folder: Path) -> int:
    """Take two updates on this rank, which has joined the others; returns the peak of the second, in bytes."""
    live = Live()
    update = prepare_updates(setting, folder, live)
    with live:
        for _ in range(2):
            live.peak = live.bytes
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            update()
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else live.peak


def prepare_updates(setting: Setting, folder: Path, live: Live | None = None) -> Callable[[], object]:
    """Collective. Build what a run builds, counted by ``live``; returns what takes an update."""
    from unisono import dist
    from unisono.build import load_and_shard
    from unisono.config.schema import LoraSection, ModelSection, StrategySection
    from unisono.model import recompute
    from unisono.optim import build_optimizer, steps_alone
    from unisono.precision import DTYPES, Precision
    from unisono.resume import trainable
    from unisono.step import take_update
    from unisono.strategy import choose

    if setting.recompute == "offload":  # here the host is the device: what waits there must not count
        recompute.to_host = lambda tensor: (tensor.device, tensor.detach().numpy().copy())
        recompute.from_host = lambda kept: torch.from_numpy(kept[1]).clone()
    world = dist.find_world()
    section = ModelSection(
        path=str(folder),
        lora=None
        if setting.lora is None
        else LoraSection(rank=setting.lora, targets=setting.lora_targets, dropout=setting.dropout),
        activation_checkpointing=setting.recompute,
        quantize=setting.quantize,
    )
    chosen = StrategySection(
        name=setting.strategy,
        share_optimizer=setting.share_optimizer,
        exchange=setting.exchange,
        shard_ranks=setting.shard_ranks,
        reshard_after_forward=not setting.keeps_gathered,
    )
    strategy = choose(chosen, world.size, DTYPES[setting.compute])
    with live or nullcontext():
        saved, training, model = load_and_shard(
            section, folder, strategy, world, weights=DTYPES[setting.weights], seed=0
        )
    if live is not None:
        for tensor in [*training.parameters(), *training.buffers()]:
            live.add(tensor)  # what was read from files
    optimizer = build_optimizer(OptimSection(name=setting.optimizer), trainable(training))
    strategy.bind(optimizer, steps_alone(optimizer) if setting.in_backward else None)
    return partial(
        take_update,
        model,
        [Batch(setting, saved.config.vocab_size) for _ in range(setting.num_micro)],
        num_targets=setting.targets * setting.num_micro * world.size,
        strategy=strategy,
        optimizer=optimizer,
        precision=Precision(setting.compute, world.device),
        world=world,
        rate=1e-4,
        max_grad_norm=None if setting.in_backward else 1.0,
    )


def run(settings: Sequence[Setting], where: Path) -> list[int]:
    """Measure settings of one number of ranks in processes of their own; returns rank 0's answers."""
    world = settings[0].ranks
    folders = [str(model_folder(SHAPE | setting.shape, where)) for setting in settings]
    described = json.dumps([[asdict(setting), folder] for setting, folder in zip(settings, folders)])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = []
    for rank in range(world):
        place = {
            "RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1,
        }  # fmt: skip
        command = [sys.executable, "-W", "ignore", __file__, "--rank", described]
        environment = os.environ | {key: str(value) for key, value in place.items()}
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    answers = [rank.communicate(timeout=600)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"a rank failed: {answers}")
    return [int(line.removeprefix(PEAK)) for line in answers[0].splitlines() if line.startswith(PEAK)]


def predicted(setting: Setting) -> Moment:
    """Ask the planner."""
    shape = architecture_of({"model_type": "llama", **SHAPE, **setting.shape}, where="here")
    load = Load(
        shape,
        setting.documents,
        setting.targets,
        is_half=setting.compute == "bf16",
        has_half_weights=setting.weights == "bf16",
        lora_rank=setting.lora,
        lora_targets=setting.lora_targets,
        has_dropout=setting.dropout > 0,
        is_packed=setting.quantize != "none",
        recompute=setting.recompute,
        strategy=setting.strategy,
        ranks=setting.ranks,
        share_optimizer=setting.share_optimizer,
        accumulates=setting.num_micro > 1,
        exchanges_always=setting.exchange == "micro_batch",
        shard_ranks=setting.shard_ranks,
        in_backward=setting.in_backward,
        keeps_gathered=setting.keeps_gathered,
        on_gpu=torch.cuda.is_available(),
    )
    optim = OptimSection(name=setting.optimizer)
    moment = peak(replace(load, moment_bytes=moment_bytes(optim, load), step_bytes=step_bytes(optim, load)))
    moment.parts.pop(RESERVE, None)  # no tensor of ours
    return moment


def settings() -> list[Setting]:
    """The grid: every strategy with every lever that composes, over formats, lengths and shapes."""
    wide = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4}
    deep = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 12, "num_attention_heads": 4}
    ragged = {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 3}
    tied = {"tie_word_embeddings": True, "vocab_size": 16000}
    rows = {"short": (150,) * 8, "one": (600,), "few": (60,)}
    found = []
    for name, documents in rows.items():
        for compute in ("fp32", "bf16"):
            found += [
                Setting(f"full {compute}, {name}", documents, compute),
                Setting(f"lora {compute}, {name}", documents, compute, lora=8),
            ]
    short, one, few, q_and_v = rows["short"], rows["one"], rows["few"], ["q_proj", "v_proj"]
    broad = {"hidden_size": 512, "intermediate_size": 2816, "num_hidden_layers": 3, "vocab_size": 1000}
    within: dict[str, dict[str, Any]] = {
        "bf16": {"compute": "bf16"},
        "fp32": {},
        "accumulation": {"compute": "bf16", "num_micro": 2},
        "each": {"compute": "bf16", "num_micro": 2, "exchange": "micro_batch"},
        "lora": {"compute": "bf16", "lora": 8},
        "in backward": {"compute": "bf16", "in_backward": True},
        "checkpointing": {"compute": "bf16", "recompute": "full"},
        "kept gathered": {"compute": "bf16", "keeps_gathered": True},
    }
    inside: dict[str, Any] = {"in_backward": True}
    for label, shape in (("wide", wide), ("deep", deep), ("tied", tied)):
        found += [
            Setting(f"full bf16, {label}", short, "bf16", shape=shape),
            Setting(f"full fp32, {label}", one, shape=shape),
            Setting(f"ddp full bf16, {label}", short, "bf16", strategy="ddp", ranks=2, shape=shape),
            Setting(f"fsdp2 full fp32, {label}", one, strategy="fsdp2", ranks=2, shape=shape),
        ]
    for strategy in ("ddp", "fsdp2"):
        two = {"strategy": strategy, "ranks": 2}
        found += [
            Setting(f"{strategy} full fp32", short, **two),
            Setting(f"{strategy} full bf16", short, "bf16", **two),
            Setting(f"{strategy} lora bf16", short, "bf16", lora=8, **two),
            Setting(f"{strategy} full bf16, accumulation", short, "bf16", num_micro=2, **two),
            Setting(f"{strategy} full bf16, checkpointing", short, "bf16", recompute="full", **two),
        ]
    return [
        *found,
        Setting("ddp full fp32, optimizer shared", one, strategy="ddp", ranks=2, share_optimizer=True),
        Setting("ddp full bf16, optimizer shared", short, "bf16", strategy="ddp", ranks=3, share_optimizer=True),
        Setting("ddp shared, accumulation", short, "bf16", strategy="ddp", ranks=2, share_optimizer=True, num_micro=2),
        Setting(
            "fsdp2 exchanging, accumulation",
            short,
            "bf16",
            strategy="fsdp2",
            ranks=2,
            num_micro=2,
            exchange="micro_batch",
        ),
        Setting("full bf16, accumulation", short, "bf16", num_micro=2),
        Setting("full bf16, checkpointing", short, "bf16", recompute="full"),
        Setting("full bf16, selective", short, "bf16", recompute="selective", shape=wide),
        Setting("full fp32, selective", one, recompute="selective"),
        Setting("lora bf16, selective", short, "bf16", lora=8, recompute="selective", shape=wide),
        Setting("fsdp2 full bf16, selective", short, "bf16", recompute="selective", **two),
        Setting("full bf16, inputs on the host", short, "bf16", recompute="offload"),
        Setting("full fp32, checkpointing", one, recompute="full"),
        Setting("lora bf16, checkpointing", short, "bf16", lora=8, recompute="full"),
        Setting("lora over bf16 weights", short, "bf16", "bf16", lora=8),
        Setting("lora bf16 on q and v", short, "bf16", lora=8, lora_targets=q_and_v),
        Setting("lora fp32 on q and v", one, lora=8, lora_targets=q_and_v),
        Setting("lora on q and v over bf16", short, "bf16", "bf16", lora=8, lora_targets=q_and_v),
        Setting("lora on o and down", short, "bf16", lora=8, lora_targets=["o_proj", "down_proj"]),
        Setting("lora bf16, dropout", short, "bf16", lora=8, dropout=0.1),
        Setting("lora fp32, dropout", one, lora=8, dropout=0.1),
        Setting("lora over nf4 and bf16, dropout", short, "bf16", "bf16", lora=8, quantize="nf4", dropout=0.1),
        Setting("lora bf16, dropout, checkpointing", short, "bf16", lora=8, dropout=0.1, recompute="full"),
        Setting("lora on q and v, dropout", short, "bf16", lora=8, lora_targets=q_and_v, dropout=0.1),
        Setting("fsdp2 lora over nf4", short, "bf16", lora=8, quantize="nf4", **two),
        Setting("lora over nf4 weights", short, "bf16", lora=8, quantize="nf4"),
        Setting("lora over nf4 and bf16", short, "bf16", "bf16", lora=8, quantize="nf4"),
        Setting("full in bf16 weights", short, "bf16", "bf16"),
        Setting("full bf16, moments of 8 bits", short, "bf16", optimizer="adamw8bit"),
        Setting("fsdp2 full bf16, moments of 8 bits", short, "bf16", strategy="fsdp2", ranks=2, optimizer="adamw8bit"),
        Setting("lora bf16, moments of 8 bits", short, "bf16", lora=8, optimizer="adamw8bit"),
        Setting("full bf16, moments of 8 bits, ragged", short, "bf16", optimizer="adamw8bit", shape=ragged),
        Setting("full bf16, moments in bf16", short, "bf16", optimizer="adamw_bf16"),
        Setting("in backward, full fp32", one, **inside),
        Setting("in backward, full bf16", short, "bf16", **inside),
        Setting("in backward, few tokens", few, "bf16", **inside),
        Setting("in backward, tied", few, shape=tied, **inside),
        Setting("full fp32, tied, few tokens", few, shape=tied),
        Setting("full fp32, tied, accumulation", few, num_micro=2, shape=tied),
        Setting("ddp full fp32, tied, few tokens", few, strategy="ddp", ranks=2, shape=tied),
        Setting("in backward, tied, accumulation", few, num_micro=2, shape=tied, **inside),
        Setting("in backward, 8 bits, recomputed", few, "bf16", optimizer="adamw8bit", recompute="full", **inside),
        Setting("in backward, bf16 weights", few, "bf16", "bf16", optimizer="adamw_bf16", **inside),
        Setting("in backward, accumulation", few, "bf16", num_micro=2, **inside),
        Setting("in backward, lora", short, "bf16", lora=8, **inside),
        Setting("in backward, fsdp2", few, "bf16", **inside, **two),
        Setting("in backward, fsdp2 fp32", one, **inside, **two),
        Setting("in backward, fsdp2, accumulation", few, "bf16", num_micro=2, **inside, **two),
        Setting("in backward, fsdp2, each", few, "bf16", num_micro=2, exchange="micro_batch", **inside, **two),
        *(
            Setting(f"fsdp2, wide, few tokens, {each}", few, shape=broad, **{**two, **own})
            for each, own in within.items()
        ),
        Setting("hybrid full bf16", short, "bf16", strategy="fsdp2", ranks=4, shard_ranks=2),
        Setting("full sgd fp32", one, optimizer="sgd"),
        Setting("full bf16, long", (1400,), "bf16"),
    ]


def main() -> int:
    """Measure the grid, print the table; 1 if the planner is further off than it promises."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="settings whose name holds this")
    parser.add_argument("--plan", action="store_true", help="only what is planned, as JSON: nothing is measured")
    parser.add_argument("--write", type=Path, help="keep the figures as JSON")
    args = parser.parse_args()
    most = torch.cuda.device_count() or max(setting.ranks for setting in settings())
    chosen = [setting for setting in settings() if args.only in setting.name and setting.ranks <= most]
    if args.plan:
        print(json.dumps({setting.name: predicted(setting).total for setting in chosen}))
        return 0
    rows, errors = [], []
    with tempfile.TemporaryDirectory(prefix="plan-truth-") as scratch:
        measured: dict[str, int] = {}
        for ranks in sorted({setting.ranks for setting in chosen}):
            group = [setting for setting in chosen if setting.ranks == ranks]
            peaks = run(group, Path(scratch))
            measured |= {setting.name: size for setting, size in zip(group, peaks, strict=True)}
        for setting in chosen:
            real, moment = measured[setting.name], predicted(setting)
            errors.append(moment.total / real - 1)
            rows.append({"setting": setting.name, "measured_bytes": real, "predicted_bytes": moment.total})
            figures = f"{real / MIB:8.1f} MiB, planned {moment.total / MIB:8.1f} ({errors[-1]:+6.1%}) at {moment.name}"
            print(f"{setting.name:40} {figures}", flush=True)
    sizes = sorted(map(abs, errors))
    middle, worst = statistics.median(sizes), sizes[-1]
    print(f"{len(sizes)} settings: {middle:.1%} off in the median, {worst:.1%} at worst")
    if args.write:
        args.write.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(middle > MEDIAN or worst > WORST)


def _as_rank(described: str) -> None:
    from unisono import dist
    from unisono.worker import leave

    torch.set_num_threads(1)
    dist.join(dist.find_world(), 60)
    for given, folder in json.loads(described):
        setting = Setting(**{**given, "documents": tuple(given["documents"])})
        print(f"{PEAK}{measure(setting, Path(folder))}", flush=True)
        gc.collect()
    leave(0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        _as_rank(*sys.argv[2:])
    sys.exit(main())
