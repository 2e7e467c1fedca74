"""What a run ran on: versions, devices, host and source revision, kept beside its numbers."""

from __future__ import annotations

import platform
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("unisono", "torch", "transformers", "peft", "tokenizers", "safetensors", "numpy")


def environment(world: int) -> dict[str, Any]:
    """Describe this process's environment as plain values."""
    gpus = [torch.cuda.get_device_properties(k) for k in range(torch.cuda.device_count())]
    return {
        "versions": {name: version(name) for name in PACKAGES} | {"python": platform.python_version()},
        "devices": [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus],
        "ranks": world,
        "threads": torch.get_num_threads(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "command": sys.argv,
        "git": _revision(),
    }


def _revision() -> str | None:
    """Return the revision of the folder the run was started in, if it is a git checkout."""
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            cwd=Path.cwd(),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
