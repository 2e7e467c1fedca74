"""Values on their way to a ``RunConfig``: with the place each was given at, and the problems so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from unisono.config.source import Path
from unisono.errors import ConfigError

COMMAND_LINE = "command line"
DEFAULT = "default"


@dataclass(frozen=True)
class Place:
    """Where a value was given: to be opened (``where``) and to be shown beside the value (``origin``)."""

    where: str
    origin: str
    line: int


@dataclass
class Draft:
    """What was read so far."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[Path, Place] = field(default_factory=dict)
    problems: list[tuple[int, ConfigError]] = field(default_factory=list)

    def problem(self, path: Path, message: str, hint: str | None = None) -> None:
        """Note what is wrong at ``path``."""
        place = self.place(path)
        self.problems.append((place.line, ConfigError(message, where=place.where, hint=hint)))

    def place(self, path: Path) -> Place:
        """Give the place of ``path``, or of the nearest section around it (of the whole file: ``()``)."""
        while path not in self.places:
            path = path[:-1]
        return self.places[path]

    def put(self, key: tuple[str, ...], value: object) -> bool:
        """Set a nested value; False where the way leads through a plain value (a problem of its own)."""
        values = self.values
        for part in key[:-1]:
            if values.get(part) is None:
                values[part] = {}
            if not isinstance(values[part], dict):
                return False
            values = values[part]
        values[key[-1]] = value
        return True

    def given(self, path: tuple[str, ...]) -> bool:
        """Say whether there is a value at ``path``."""
        values: object = self.values
        for part in path:
            if not isinstance(values, dict) or part not in values:
                return False
            values = values[part]
        return True
