"""The results: numbers as JSON, and the table a person reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from contestants import CONTESTANTS, OURS
from trial import Trial


@dataclass(frozen=True)
class Setting:
    """What was measured, and on what."""

    model: str
    precision: str
    ranks: int
    global_size: int
    rate: float
    row_tokens: int
    warmup: int
    updates: int
    rounds: int
    machine: dict[str, object]


def write(folder: Path, setting: Setting, trials: Sequence[Trial]) -> str:
    """Write ``results-<precision>.json`` and ``RESULTS-<precision>.md``; return the table."""
    values = {"setting": asdict(setting), "trials": [asdict(trial) for trial in trials]}
    (folder / f"results-{setting.precision}.json").write_text(json.dumps(values, indent=1) + "\n")
    rows = _table(setting, trials)
    text = "\n".join([*_heading(setting), "", *rows, "", *_notes(setting, trials), ""])
    (folder / f"RESULTS-{setting.precision}.md").write_text(text)
    return "\n".join(rows)


def best_peer(setting: Setting, trials: Sequence[Trial]) -> tuple[str, float] | None:
    """Return the fastest contestant that is not unisono, and its speed."""
    peers = {t.contestant for t in trials if not t.contestant.startswith(OURS)}
    speeds = [(_speed(setting, trials, name), name) for name in peers]
    return (max(speeds)[1], max(speeds)[0]) if speeds else None


def _speed(setting: Setting, trials: Sequence[Trial], name: str) -> float:
    return median(t.speed(setting.warmup) for t in trials if t.contestant == name)


def _heading(setting: Setting) -> list[str]:
    m = setting.machine
    half = "does not multiply bf16 in hardware"
    for flag, name in (("avx512_bf16", "AVX-512 BF16"), ("amx_bf16", "AMX")):
        half = f"multiplies bf16 in hardware ({name})" if m[flag] else half
    versions = ", ".join(f"{name} {number}" for name, number in dict(m["versions"]).items())  # type: ignore[call-overload]
    return [
        f"# unisono and its peers, {setting.precision}",
        "",
        f"Written by `benchmarks/peers/run.py`. {setting.model}, full fine-tuning on GSM8K, the answers alone are "
        f"targets. {setting.ranks} processes, {setting.global_size} samples an update, {setting.precision} compute "
        f"over fp32 weights, AdamW at a constant rate of {setting.rate:g}, clipped at 1.0. Contestants take turns, "
        f"{setting.rounds} rounds; {setting.updates} updates each, the first {setting.warmup} not counted.",
        "",
        f"* CPU: {m['cpu']}, {m['cores']} cores, {m['memory_gib']} GiB; it {half}. {m['system']}, Python {m['python']}",
        f"* {versions}",
    ]


def _table(setting: Setting, trials: Sequence[Trial]) -> list[str]:
    """Return one line per contestant, fastest first. Speed is of useful tokens: padding counts for nothing."""
    names = sorted({t.contestant for t in trials}, key=lambda name: -_speed(setting, trials, name))
    best = best_peer(setting, trials)
    lines = [
        "| contestant | tokens/s | lowest-highest | x best peer | s/update | peak GiB | first loss | last loss |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in names:
        own = [t for t in trials if t.contestant == name]
        speeds = [t.speed(setting.warmup) for t in own]
        seconds = median(s for t in own for s in t.seconds[setting.warmup :])
        ratio = f"{median(speeds) / best[1]:.2f}" if best else "-"
        lines.append(
            f"| {CONTESTANTS[name].words} | {median(speeds):.1f} | {min(speeds):.1f}-{max(speeds):.1f} | {ratio} "
            f"| {seconds:.1f} | {max(t.peak_bytes for t in own) / 2**30:.2f} "
            f"| {own[0].losses[0]:.4f} | {own[0].losses[-1]:.4f} |"
        )
    return lines


def _notes(setting: Setting, trials: Sequence[Trial]) -> list[str]:
    loads = [t.load for t in trials]
    lines = [
        "Useful tokens are those of the samples; padding is not counted. Padded contestants and unisono train the same "
        "samples in each update, so their first losses agree but for the newline that the chat template writes behind "
        "the end marker: a target for the peers, none for unisono. TRL's packing and batch_rebalance choose other "
        "samples for an update, about as many tokens.",
        "",
        f"Load average when trials began: {min(loads):.1f}-{max(loads):.1f} on {setting.machine['cores']} cores.",
    ]
    if max(loads) > 1.5 * float(str(setting.machine["cores"])):
        lines += ["", "**The machine was not quiet: these times are a trial of the scripts, not a measurement.**"]
    return lines
