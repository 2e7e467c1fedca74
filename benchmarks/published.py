"""Plan what others have published, and print by how much the planner is off.

python benchmarks/published.py [--parts]

``published.json`` holds the figures with their sources and settings. The figures are of other programs: what those keep
otherwise than we do stands here as terms of its own, each derived from their public code, with no factor that is
fitted. Parts of our plan are replaced by these terms, so that what is compared is what both have in common. What a
row's settings do not say is assumed: samples of full length, bf16 weights, AdamW; see ``docs/plan.md``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unisono.plan.architecture import Architecture, architecture_of
from unisono.plan.hardware import find_device
from unisono.plan.memory import CUDA_FRAGMENTATION, HALF, NF4_BYTES, RESERVE, Load, Moment, kept_bytes, moments
from unisono.plan.time import BACKWARD_PASSES, BANDWIDTH, FORWARD_PASSES, seconds_of_update

TABLE = Path(__file__).with_name("published.json")
MEMORY, TIME = 0.10, 0.25  # how far off the planner may be
DOUBLE_NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # the scales of 64 values are themselves in 8 bits
Parts = dict[str, float]


@dataclass(frozen=True)
class Row:
    """A published figure beside ours, in bytes and in tokens a second (None where none is published)."""

    name: str
    source: str
    published: int
    planned: Moment
    published_speed: float | None
    planned_speed: float | None

    @property
    def memory_error(self) -> float:
        """How much more is planned than was measured, as a share of it."""
        return self.planned.total / self.published - 1

    @property
    def speed_error(self) -> float | None:
        """The same of tokens a second."""
        if self.planned_speed is None or self.published_speed is None:
            return None
        return self.planned_speed / self.published_speed - 1


def rows() -> Iterator[Row]:
    """Plan every row of the table."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    for row in table["rows"]:
        load = load_of(row, architecture_of(table["models"][row["model"]], where=row["model"]))
        measured = row.get("tokens_per_second")
        speed = None if measured is None else tokens_per_second(row, load)
        source = f"{row['program']}: {row['config']}"
        yield Row(row["name"], source, row["bytes"], theirs(row, load), measured, speed)


def tokens_per_second(row: dict[str, Any], load: Load) -> float:
    """Return what the planner expects; compiled, what is kept is written where it is made and read where it is used."""
    device = find_device(row["device"])
    seconds = seconds_of_update(load, device, num_micro=1)
    if row["program"] == "torchtune":
        spared = (2 if load.checkpointing else 1) * (FORWARD_PASSES - 1) + BACKWARD_PASSES - 2
        fused = spared * kept_bytes(load) / (device.memory_gb_per_second * 1e9 * BANDWIDTH)
        seconds = replace(seconds, elementwise=seconds.elementwise - fused)
    return seconds.tokens_per_second


def load_of(row: dict[str, Any], shape: Architecture) -> Load:
    """Say a row's settings to the planner."""
    return Load(
        shape,
        (row["length"],) * row["batch"],
        row["length"] * row["batch"],
        is_half=True,
        has_half_weights=True,
        lora_rank=row.get("lora_rank"),
        lora_targets=row.get("lora_targets", "all-linear"),
        has_dropout=row.get("dropout", 0.0) > 0,
        is_packed=row.get("quantize", "none") != "none",
        recompute="full" if row.get("checkpointing") else "none",
        moment_bytes=2 * HALF,  # AdamW's have the format of the parameters
        strategy=row.get("strategy", "single"),
        ranks=row.get("ranks", 1),
        accumulates=row.get("accumulates", False),
        on_gpu=True,
    )


def theirs(row: dict[str, Any], load: Load) -> Moment:
    """Return the peak with what their program keeps in place of ours; without what lies outside the allocator."""
    terms = {"litgpt": litgpt, "fsdp_qlora": fsdp_qlora, "torchtune": torchtune}[row["program"]]
    found = []
    for moment in moments(load):
        parts: Parts = {name: size for name, size in moment.parts.items() if name != RESERVE}
        terms(load, parts, row["counts"])
        if row["counts"] == "reserved":
            parts["blocks that are cut"] = CUDA_FRAGMENTATION * sum(parts.values())
        found.append(Moment(moment.name, {name: int(size) for name, size in parts.items()}))
    return max(found, key=lambda moment: moment.total)


def _adapters_in_bf16(load: Load, parts: Parts) -> None:
    """Their adapters have the format of the base, and so have gradients and moments; ours are fp32."""
    if load.lora_rank is None:
        return
    ranks = load.ranks if load.is_sharded else 1
    parts.pop("weights in bf16", None)
    parts["weights"] -= HALF * load.trained / ranks
    parts["gradients"] = HALF * load.trained / ranks  # they are there from the second micro-batch on


def litgpt(load: Load, parts: Parts, counts: str) -> None:
    """LitGPT 2024: one product for queries, keys and values; logits whole; everything else in bf16.

    Attention keeps values as a view of that product, which keeps all of it (2 a + 4 k more), or, where groups share
    keys, keys and values repeated for every head (4 (a - k) more). The adapters of queries and values share one input
    with one dropout. Logits are made in four chunks whose list, and those of the micro-batch before, live until the
    next are there; log-softmax keeps as much. A tied head is kept apart from the embedding.
    """
    _adapters_in_bf16(load, parts)
    shape, n = load.architecture, load.tokens
    a, k, h, V = shape.attention, shape.key_value, shape.hidden, shape.vocabulary
    parts["weights"] += HALF * V * h * shape.is_tied
    if "loss head" not in parts:
        return
    is_grouped = shape.heads != shape.key_value_heads
    parts["values as views, repeated keys"] = HALF * n * shape.layers * (2 * (a - k) if is_grouped else a + k)
    parts["loss head"] = 3 * HALF * n * V
    if load.lora_rank is not None:
        num_inputs = sum(name in ("q_proj", "k_proj", "v_proj") for name in shape.linear(load.lora_targets))
        parts["inputs of q and v, once"] = -(HALF + 1) * n * shape.layers * h * max(0, num_inputs - 1)
    if load.is_packed:
        _bitsandbytes_2024(load, parts)


def _bitsandbytes_2024(load: Load, parts: Parts) -> None:
    """bitsandbytes of early 2024 keeps a product's input as a plain attribute of its autograd node (MatMul4Bit).

    So it is kept though the weight is frozen, also where an adapter keeps another (dropped) copy; and it lives as long
    as the loss does, which is until the next loss is there: twice, at the end of a forward. The second time the output
    of attention counts, too, which the first time attention keeps anyway. LitGPT packs the head as well, whose weight
    is made whole for each chunk of logits.
    """
    shape, n = load.architecture, load.tokens
    h, a, f = shape.hidden, shape.attention, shape.intermediate
    parts["weights"] -= (HALF - NF4_BYTES) * shape.vocabulary * h
    parts["the head, made whole"] = HALF * shape.vocabulary * h
    parts["inputs of packed products"] = HALF * n * shape.layers * (2 * h + f)
    parts["the same of the micro-batch before"] = HALF * n * shape.layers * (2 * h + a + f)


def fsdp_qlora(load: Load, parts: Parts, counts: str) -> None:
    """Answer.AI's script, on transformers of early 2024, whose loss has logits whole and in fp32.

    Backward has the logits, their log-softmax, its gradient and the gradient of that: 16 bytes each. The allocator
    holds 22: a bf16 copy from before, and a place of its own for the gradient of all positions, since those that were
    freed are of all but the last. FSDP gathers the next block while one is in work.
    """
    _adapters_in_bf16(load, parts)
    if "loss head" not in parts:
        return
    parts["loss head"] = (22 if counts == "reserved" else 16) * load.tokens * load.architecture.vocabulary
    if load.is_sharded:
        parts["the next block"] = HALF * load.architecture.block


def torchtune(load: Load, parts: Parts, counts: str) -> None:
    """torchtune of September 2024: logits in eight chunks, which a compiled loss turns into gradients one by one.

    Full: each gradient is used and freed in backward, so that the head's, the largest, is the only one; 8-bit moments
    are in pages of unified memory, which torch does not count. NF4: torchao's, with scales of 8 bits.
    """
    _adapters_in_bf16(load, parts)
    shape = load.architecture
    if load.lora_rank is None:
        parts["optimizer"], parts["gradients"] = 0, HALF * shape.embedding
    if load.is_packed:
        parts["weights"] -= (NF4_BYTES - DOUBLE_NF4_BYTES) * shape.layers * shape.matrices
    if "loss head" in parts:
        parts["loss head"] = (HALF + (4 + HALF) / 8) * load.tokens * shape.vocabulary


def table(found: list[Row], *, shows_parts: bool = False) -> Iterator[str]:
    """Print a line for each figure."""
    yield "| published | GB | planned | off | tokens/s | planned | off |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for row in found:
        speed = "| | | |"
        if row.speed_error is not None:
            speed = f"| {row.published_speed:,.0f} | {row.planned_speed:,.0f} | {row.speed_error:+.0%} |"
        figures = f"{row.published / 1e9:.2f} | {row.planned.total / 1e9:.2f} | {row.memory_error:+.1%}"
        yield f"| {row.name} ({row.source}) | {figures} {speed}"
        if shows_parts:
            yield f"    at {row.planned.name}: " + ", ".join(f"{n} {s / 1e9:.2f}" for n, s in row.planned.parts.items())


def main() -> int:
    """Print the table; 1 if a figure is further off than it may be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", action="store_true", help="show what each plan is made of")
    found = list(rows())
    print("\n".join(table(found, shows_parts=parser.parse_args().parts)))
    memory = [abs(row.memory_error) for row in found]
    speed = [abs(row.speed_error) for row in found if row.speed_error is not None]
    print(
        f"{len(memory)} figures: memory {statistics.median(memory):.1%} off in the median, {max(memory):.1%} at worst"
    )
    return int(max(memory) > MEMORY or max(speed) > TIME)


if __name__ == "__main__":
    raise SystemExit(main())
