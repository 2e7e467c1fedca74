"""What a tuning leaves: the person's run file with the values that were kept and the evidence, and all figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from unisono.config.edit import put, put_all
from unisono.config.load import Loaded, load, load_text, read_override
from unisono.durable import replace_file
from unisono.errors import ConfigError
from unisono.goodput import counted
from unisono.tune.candidates import LeftOut
from unisono.tune.trials import Evidence

VERSION = 1


@dataclass(frozen=True)
class Result:
    """All that was found, on what (in words, and as a run's environment.json has it), with how many counted updates."""

    evidence: Sequence[Evidence]
    left_out: Sequence[LeftOut]
    ranks: int
    updates: int
    machine: str
    environment: Mapping[str, Any]

    @property
    def changes(self) -> dict[str, object]:
        """The values that were kept, by dotted key; of a key that was changed twice the last."""
        return {key: value for each in self.evidence if each.kept for key, value in each.setting.changes.items()}


def write(loaded: Loaded, given: Sequence[str], out: Path, result: Result) -> None:
    """Write ``out`` and its figures (.json beside it), each by one rename."""
    day = datetime.now().astimezone().date()
    figures = {
        "version": VERSION,
        "date": str(day),
        "run_file": str(loaded.path),
        "overrides": list(given),
        "ranks": result.ranks,
        "counted_updates": result.updates,
        "machine": result.machine,
        "environment": {key: value for key, value in result.environment.items() if key != "command"},
        "kept": result.changes,
        "settings": [{"name": each.setting.name, **asdict(each), "log_ratios": each.pairs} for each in result.evidence],
        "not_tried": [asdict(each) for each in result.left_out],
    }
    text = "".join(f"# {line}\n" for line in _heading(loaded, given, result, out, str(day)))
    text += tuned_text(loaded, given, result.changes)
    replace_file(out.with_suffix(".json"), orjson.dumps(figures, option=orjson.OPT_INDENT_2) + b"\n")
    replace_file(out, text.encode())


def _heading(loaded: Loaded, given: Sequence[str], result: Result, out: Path, day: str) -> list[str]:
    with_overrides = f" with {' '.join(given)}" if given else ""
    kept = [each for each in result.evidence if each.kept]
    others = [each for each in result.evidence if not each.kept]
    return [
        f"{loaded.path.name}{with_overrides}, tuned by `unisono tune` on {day}. The model stays the same.",
        f"Measured with {result.ranks} ranks on {result.machine}.",
        f"Paired trials of {result.updates} counted updates: how many times as fast, and the interval at 95 % for",
        f"{counted(len(result.evidence), 'setting')} together. Every figure is in {out.with_suffix('.json').name}.",
        "Kept:" if kept else "Kept: nothing, no setting gains more than the noise explains.",
        *map(_line, kept),
        *(["Tried, and left as it was:"] if others else []),
        *map(_line, others),
    ]


def _line(evidence: Evidence) -> str:
    return f"  {evidence.setting.name}: {evidence}".splitlines()[0]


def tuned_text(loaded: Loaded, given: Sequence[str], changes: Mapping[str, object]) -> str:
    """Return the run file's text with the overrides of the command line and ``changes`` in it.

    Raises ConfigError where changing the text gives another run file than overrides would.
    """
    text = loaded.path.read_text(encoding="utf-8-sig")
    for override in given:
        text = put(text, *read_override(override))
    text = put_all(text, changes)
    expected = load(loaded.path, [*given, *(f"{key}={orjson.dumps(value).decode()}" for key, value in changes.items())])
    try:
        is_right = load_text(text, loaded.path).config == expected.config
    except ConfigError:
        is_right = False
    if not is_right:
        raise ConfigError(
            "its text cannot be changed value by value",
            where=str(loaded.path),
            hint="write it without anchors and aliases (& and *): `unisono config` shows it so",
        )
    return text
