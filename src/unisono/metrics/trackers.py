"""Where metrics go besides ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unisono.errors import ConfigError


class TensorBoard:
    """Writes every number of a line as a scalar under the run folder."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                "log.trackers names tensorboard, which is not installed",
                where="log.trackers",
                hint="pip install 'unisono[tensorboard]', or remove it: metrics.jsonl is always written",
            ) from None
        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def write(self, values: dict[str, Any]) -> None:
        """Write the numbers of one metrics line; a named validation set has scalars of its own."""
        prefix = "/".join(filter(None, (values.get("kind", "train"), values.get("name"))))
        for name, value in values.items():
            if isinstance(value, (int, float)) and name != "update":
                self._writer.add_scalar(f"{prefix}/{name}", value, values["update"])

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


def open_trackers(names: Sequence[str], folder: Path) -> list[TensorBoard]:
    """Open the trackers of the run file."""
    return [TensorBoard(folder) for _ in names]
