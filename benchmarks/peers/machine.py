"""What the machine and the installed versions are: a number without them is worth nothing."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import distributions, version
from pathlib import Path

PACKAGES = ("torch", "unisono", "cmeel-mimalloc")  # what a peer runs on, it says itself


def describe() -> dict[str, object]:
    """Return CPU, cores, by what it multiplies bf16, memory, and versions."""
    text = Path("/proc/cpuinfo").read_text()
    found = re.search(r"model name\s*: (.*)", text)
    flags = set(re.findall(r"flags\s*: (.*)", text)[0].split()) if "flags" in text else set()
    memory = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())
    return {
        "cpu": found[1] if found else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "amx_bf16": "amx_bf16" in flags,
        "avx512_bf16": "avx512_bf16" in flags,
        "memory_gib": round(int(memory[1]) / 2**20, 1) if memory else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
    }


def load_average() -> float:
    """Return how many processes want a core, averaged over the last minute."""
    return os.getloadavg()[0]


def mimalloc() -> Path:
    """Return the library that the package cmeel-mimalloc carries."""
    for package in distributions(name="cmeel-mimalloc"):
        for file in package.files or []:
            if file.name == "libmimalloc.so":
                return Path(str(file.locate())).resolve()
    raise SystemExit("error: the package cmeel-mimalloc carries no libmimalloc.so here")
