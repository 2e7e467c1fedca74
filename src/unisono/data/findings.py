"""What a check of the data found, for a person and for a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text as RichText

Status = Literal["ok", "info", "warn", "fail"]
CHECK_VERSION = 1
_COLOURS: dict[Status, str] = {"ok": "green", "info": "blue", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for; the fields are the keys of ``unisono data check --json``.

    name and set: what was looked for and where; they stay. ``fail``: the run would mean something else than it seems;
    ``warn``: it may disappoint; ``info``: nothing wrong, but worth knowing. count: of what the detail names, 0 when
    nothing was found. examples: the first few, ``file:place``.
    """

    name: str
    set: str
    status: Status
    count: int
    detail: str
    examples: tuple[str, ...] = ()
    hint: str | None = None


def as_object(findings: Sequence[Finding]) -> dict[str, Any]:
    """Give the findings as an object whose keys stay; ``ok`` is false when one of them failed."""
    failed = any(finding.status == "fail" for finding in findings)
    return {"version": CHECK_VERSION, "ok": not failed, "findings": [asdict(finding) for finding in findings]}


def show(findings: Sequence[Finding], console: Console | None = None) -> None:
    """Print the findings as a table, examples and hint below each detail, and their sum."""
    out = console or Console()
    table = Table(box=None, padding=(0, 1))
    for title in ("", "what", "where", "found"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        found = RichText(finding.detail)
        for example in finding.examples:
            found.append(f"\n  {example}")
        if finding.count > len(finding.examples) > 0:
            found.append(f"\n  ... and {finding.count - len(finding.examples):,} more")
        if finding.hint:
            found.append(f"\nhint: {finding.hint}", "dim")
        status = RichText(finding.status, _COLOURS[finding.status])
        table.add_row(status, finding.name.replace("_", " "), finding.set, found)
    out.print(table)
    counts = {status: sum(finding.status == status for finding in findings) for status in _COLOURS}
    out.print(
        f"{counts['ok']} ok, {counts['info']} to know, {counts['warn']} to look at, {counts['fail']} failed",
        highlight=False,
    )
