"""Libraries that not everybody needs: loaded when a file asks for them, missed with the command that installs them."""

from __future__ import annotations

import importlib
from typing import Any

from unisono.errors import DataError


def load_library(module: str, extra: str, where: str) -> Any:
    """Import a module; DataError with the pip command when it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise DataError(
            f"reading it needs the package {error.name or module}, which is not installed",
            where=where,
            hint=f"pip install 'unisono[{extra}]'",
        ) from error
