"""How far this process's memory rose: the kernel's own high-water mark, which misses no moment."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any


def kernel_bytes(name: str) -> int:
    """Return a size of this process as the kernel tells it: VmRSS, VmHWM (the most of it), VmSize."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {name} in /proc/self/status")


def give_back_what_is_freed() -> None:
    """Let the allocator map blocks of 1 MB and more by themselves, so that it cannot use memory of before unseen."""
    m_mmap_threshold = -3
    assert ctypes.CDLL(None).mallopt(m_mmap_threshold, 2**20)


def risen(action: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[int, Any]:
    """Call ``action``; returns by how many bytes the resident set rose at most meanwhile, and what it returned."""
    Path("/proc/self/clear_refs").write_text("5")  # the mark is what is resident now
    before = kernel_bytes("VmRSS")
    result = action(*args, **kwargs)
    return kernel_bytes("VmHWM") - before, result
