"""Go through all findings, show what is being looked at, and show or print what was found."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from unisono.doctor import devices, host, software, speed
from unisono.doctor.exchange import exchange
from unisono.doctor.finding import Finding

Step = tuple[str, Callable[[], Finding | list[Finding]]]
_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def run(*, usable_cores: int, as_json: bool) -> int:
    """Examine this machine; ``usable_cores`` counts affinity and container limits. Returns the exit code."""
    findings = list(_examine(usable_cores, Console(stderr=True)))
    failed = any(finding.status == "fail" for finding in findings)
    if as_json:
        report = {"ok": not failed, "findings": [dataclasses.asdict(finding) for finding in findings]}
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        show(findings, Console())
    return 1 if failed else 0


def show(findings: list[Finding], console: Console) -> None:
    """Print the findings as a table, each hint below its detail."""
    table = Table(box=None, padding=(0, 1))
    for title in ("", "what", "found"):
        table.add_column(title, overflow="fold")
    for finding in findings:
        colour = _COLOURS[finding.status]
        hint = f"\n[dim]hint: {_plain(finding.hint)}[/]" if finding.hint else ""
        table.add_row(f"[{colour}]{finding.status}[/]", finding.name, _plain(finding.detail) + hint)
    console.print(table)
    counts = {status: sum(finding.status == status for finding in findings) for status in _COLOURS}
    console.print(f"{counts['ok']} ok, {counts['warn']} to look at, {counts['fail']} failed")


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


def _examine(usable_cores: int, progress: Console) -> Iterator[Finding]:
    for name, look in _steps(usable_cores):
        if progress.is_terminal:
            with progress.status(f"looking at {name}"):
                found = look()
        else:
            progress.print(f"looking at {name}")
            found = look()
        yield from found if isinstance(found, list) else [found]


def _steps(usable_cores: int) -> Iterator[Step]:
    """Give the steps in order; those that need torch only once it is known to be there."""
    oldest = software.needed()
    least_torch = oldest.pop("torch")
    yield "Python", software.python
    torch: list[Finding] = []
    yield "torch", lambda: _kept(torch, software.torch(software.installed("torch"), least_torch))
    found = {name: software.installed(name) for name in oldest}
    yield "libraries", lambda: software.libraries(oldest, found)
    yield "memory", host.memory
    yield "disk", lambda: [host.disk("disk, here", Path.cwd()), host.disk("disk, cache", host.cache_folder())]
    yield "shared memory", host.shared_memory
    yield "ports", host.ports
    yield "threads", lambda: host.threads(usable_cores, os.environ)
    yield "host name", host.host_name
    if torch[0].status != "fail":
        yield from _steps_with_torch()


def _steps_with_torch() -> Iterator[Step]:
    yield "devices", devices.gpus
    yield "visible devices", devices.visibility
    yield "backends", devices.backends
    yield "number formats", speed.formats
    yield "an exchange between two processes", lambda: exchange("gloo")
    if devices.visible_gpus() >= 2:
        yield "an exchange between two GPUs", lambda: exchange("nccl")


def _kept(store: list[Finding], finding: Finding) -> Finding:
    store.append(finding)
    return finding
