"""A faster memory allocator for CPU ranks and for the processes that prepare data, if one is on the machine.

Training allocates and frees the same large blocks all the time; glibc gives them back to the kernel and pays for
fresh pages each time, the allocators looked for here keep them. Tokenising makes and drops millions of small blocks.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

KNOWN = ("mimalloc", "tcmalloc", "jemalloc")
_WHEEL = "cmeel-mimalloc"
_SYSTEM = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4", "libjemalloc.so.2")


def find_allocator() -> Path | None:
    """Return the first allocator that a Python process starts with, or None."""
    return next((library for library in _candidates() if _works(library)), None)


def _candidates() -> Iterator[Path]:
    yield from _from_wheel()
    triplet = sysconfig.get_config_var("MULTIARCH")
    folders = [Path("/usr/lib") / triplet] if triplet else []
    for folder in [*folders, Path("/usr/lib64"), Path("/usr/lib"), Path("/usr/local/lib")]:
        for name in _SYSTEM:
            if (folder / name).is_file():
                yield folder / name


def _from_wheel() -> Iterator[Path]:
    """Yield the library that the package cmeel-mimalloc carries."""
    try:
        listed = files(_WHEEL) or []
    except PackageNotFoundError:
        return
    for file in listed:
        if re.fullmatch(r"libmimalloc\.so(\.\d+)?", file.name):
            yield Path(str(file.locate())).resolve()


def _works(library: Path) -> bool:
    """Start a bare Python with the library: a wrong or broken one complains or crashes there, not in a rank."""
    if not library.is_file():
        return False
    command = [sys.executable, "-I", "-S", "-c", ""]
    trial = subprocess.run(command, env={"LD_PRELOAD": str(library)}, capture_output=True, timeout=60, check=False)
    return trial.returncode == 0 and not trial.stderr
