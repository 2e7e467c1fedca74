"""The lines a run leaves: one JSON object per update, and per-rank events. Append-only, cut back on resume."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from unisono.errors import OutputError


class JsonLines:
    """A file of JSON lines, opened for appending; each line reaches the file as it is written."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file.open("ab")

    def write(self, values: dict[str, Any]) -> None:
        """Append one object."""
        self._file.write(orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Make it durable and close it."""
        os.fsync(self._file.fileno())
        self._file.close()


def cut_after(file: Path, update: int) -> None:
    """Drop the lines of updates after ``update`` (they will be done again) and a torn last line; by one rename.

    Raises OutputError for a line that no run has written.
    """
    if not file.is_file():
        return
    kept = []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            if orjson.loads(line)["update"] <= update:
                kept.append(line + b"\n")
        except orjson.JSONDecodeError:
            break
        except (KeyError, TypeError):
            raise OutputError(
                "this is not a line of a run", where=f"{file}:{number}", hint="choose another run.output_dir"
            ) from None
    private = file.with_name(f".{file.name}.tmp")
    private.write_bytes(b"".join(kept))
    os.replace(private, file)


class Spans:
    """Seconds by cause within an update; what no span covers is ``other``, so that the parts add up to the whole."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    def span(self, name: str) -> _Span:
        """Return a context whose duration is added to ``name``."""
        return _Span(self, name)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to ``name``."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> tuple[float, dict[str, float]]:
        """Return the seconds since the last take and their parts, and start anew."""
        now = time.perf_counter()
        total, parts = now - self._start, self._seconds
        self._start, self._seconds = now, {}
        return total, parts | {"other": max(0.0, total - sum(parts.values()))}


class _Span:
    def __init__(self, spans: Spans, name: str) -> None:
        self._spans = spans
        self._name = name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._spans.add(self._name, time.perf_counter() - self._start)
