"""What the doctor found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One finding: ``fail`` means that training cannot work, ``warn`` that it may disappoint."""

    name: str
    status: Status
    detail: str
    hint: str | None = None
