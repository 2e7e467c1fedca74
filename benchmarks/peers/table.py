"""The table a person reads: a row per contestant, cell by cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from cell import Cell, parse
from contestants import CONTESTANTS, OURS, REFERENCE
from results import Results
from trial import Trial

NOISE = 0.1  # of what the reference has learnt: other samples in an update, adapters that begin otherwise, bf16


@dataclass(frozen=True)
class Row:
    """A contestant's figures in a cell: useful tokens a second (median, lowest, highest), bytes, seconds, loss."""

    name: str
    speed: float
    lowest: float
    highest: float
    peak_bytes: int
    first_seconds: float
    loss: float
    is_wrong: bool

    @property
    def counts(self) -> bool:
        """Whether it is a peer that unisono is compared with: a fast wrong loss does not count."""
        return not (self.is_wrong or self.name.startswith(OURS))


def is_wrong(loss: float, reference: Trial) -> bool:
    """Tell whether a final loss is another one than the reference's, beyond noise; what is not a number is."""
    assert reference.loss_before is not None
    return not abs(loss - reference.loss) <= NOISE * abs(reference.loss_before - reference.loss)


def rows(results: Results, cell: Cell, warmup: int) -> list[Row]:
    """Return a row for each contestant that has answered, fastest first."""
    reference = results.reference(cell)
    found = []
    for name in CONTESTANTS:
        own = [t for t in _of(results, cell) if t.contestant == name and t.failure is None]
        if not own or name == REFERENCE:
            continue
        speeds = [t.speed(warmup) for t in own]
        found.append(
            Row(
                name,
                median(speeds),
                min(speeds),
                max(speeds),
                max(t.peak_bytes for t in own),
                median(t.first_seconds for t in own),
                median(t.loss for t in own),
                reference is not None and any(is_wrong(t.loss, reference) for t in own),
            )
        )
    return sorted(found, key=lambda row: -row.speed)


def document(results: Results, machine: dict[str, object]) -> str:
    """Return the whole page."""
    cells = list(dict.fromkeys(t.cell for t in results.trials if t.contestant != REFERENCE))
    parts = [_heading(results, machine)]
    for name in cells:
        parts.append(f"## {name}\n\n" + "\n".join(cell_table(results, parse(name))))
    return "\n\n".join([*parts, *_notes(results, machine)]) + "\n"


def cell_table(results: Results, cell: Cell) -> list[str]:
    """Return a cell's table; those that did not run come last, with the reason."""
    found = rows(results, cell, int(str(results.settings["warmup"])))
    peers = [row for row in found if row.counts]
    fastest = max((row.speed for row in peers), default=None)
    leanest = min((row.peak_bytes for row in peers), default=None)
    lines = [
        "| contestant | tokens/s | lowest-highest | x best peer | GiB a process | x leanest | first update s | loss |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in found:
        loss = f"**wrong loss** {row.loss:.4f}" if row.is_wrong else f"{row.loss:.4f}"
        speed = f"{row.speed / fastest:.2f}" if fastest and not row.is_wrong else "-"
        memory = f"{row.peak_bytes / leanest:.2f}" if leanest and not row.is_wrong else "-"
        lines.append(
            f"| {CONTESTANTS[row.name].words} | {row.speed:.1f} | {row.lowest:.1f}-{row.highest:.1f} | {speed} "
            f"| {row.peak_bytes / 2**30:.2f} | {memory} | {row.first_seconds:.1f} | {loss} |"
        )
    for trial in _of(results, cell):
        if trial.failure is not None and trial.contestant != REFERENCE:
            reason = trial.failure.replace("|", "\\|")
            lines.append(f"| {CONTESTANTS[trial.contestant].words} | does not run: {reason} | | | | | | |")
    reference = results.reference(cell)
    judged = f"{reference.loss_before:.4f} before, {reference.loss:.4f} after" if reference else "not measured"
    return [*lines, "", f"Reference loss: {judged}."]


def _of(results: Results, cell: Cell) -> Sequence[Trial]:
    return [t for t in results.trials if t.cell == str(cell)]


def _heading(results: Results, machine: dict[str, object]) -> str:
    half = "does not multiply bf16 in hardware"
    for flag, name in (("avx512_bf16", "AVX-512 BF16"), ("amx_bf16", "AMX")):
        half = f"multiplies bf16 in hardware ({name})" if machine[flag] else half
    versions = dict(machine["versions"])  # type: ignore[call-overload]
    own: dict[str, dict[str, str]] = {}
    for t in results.trials:
        own.setdefault(CONTESTANTS[t.contestant].environment or "the others", {}).update(t.versions)
    lines = [f"* {name}: " + ", ".join(f"{k} {v}" for k, v in sorted(found.items())) for name, found in own.items()]
    settings = ", ".join(f"{name} {value}" for name, value in results.settings.items())
    memory = f"{machine['memory_gib']} GiB"
    return "\n".join(
        [
            "# unisono and its peers",
            "",
            "Written by `benchmarks/peers/run.py`. A cell is: number format of the products, full or lora, processes, "
            "samples an update, data. AdamW at a constant rate, clipped at 1.0. Contestants of a cell take turns, "
            "round by round; a row has the median of its rounds.",
            "",
            f"* {settings}",
            f"* CPU: {machine['cpu']}, {machine['cores']} cores, {memory}; it {half}. {machine['system']}, "
            f"Python {machine['python']}",
            "* " + ", ".join(f"{name} {number}" for name, number in versions.items()),
            *lines,
        ]
    )


def _notes(results: Results, machine: dict[str, object]) -> list[str]:
    loads = [t.load for t in results.trials]
    notes = [
        "Useful tokens are those of the samples; padding is not counted. All train the same tokens with the same "
        "labels; where a trainer groups, balances or packs by length, an update has other samples of the same set. "
        "The loss is that of the trained model on samples that nobody has trained. One that is off the reference's "
        f"by more than {NOISE:.0%} of what the reference has learnt is wrong, and its row is not compared with."
    ]
    if loads:
        notes.append(f"Load average when trials began: {min(loads):.1f}-{max(loads):.1f} on {machine['cores']} cores.")
        if max(loads) > 1.5 * float(str(machine["cores"])):
            notes.append("**The machine was not quiet: these times are a trial of the scripts, not a measurement.**")
    return notes
