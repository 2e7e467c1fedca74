"""GPUs as torch sees them, and the libraries that move data between ranks.

CUDA_VISIBLE_DEVICES is shown, never read: indices, UUIDs, MIG names and spaces are torch's business.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

from unisono.doctor.finding import Finding

_GIB = 1 << 30
_DRIVER = Path("/proc/driver/nvidia/version")


def visible_gpus() -> int:
    """Ask torch how many GPUs this process may use."""
    import torch

    with warnings.catch_warnings(record=True):  # ``gpus`` shows them
        warnings.simplefilter("always")
        return torch.cuda.device_count() if torch.cuda.is_available() else 0


def gpus() -> list[Finding]:
    """Describe every visible GPU, or say why there is none."""
    import torch

    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    built = torch.version.cuda or torch.version.hip
    if not built:
        return [Finding("gpu", "ok", "none: this torch is built for the CPU")]
    if count == 0:
        reasons = [str(complaint.message).splitlines()[0] for complaint in complaints]
        detail = f"none visible to torch (built for {built}); {mask()}" + "".join(f"; {text}" for text in reasons)
        return [
            Finding("gpu", "warn", detail, "look at the driver and at CUDA_VISIBLE_DEVICES; without, the CPU is used")
        ]
    return [_gpu(index) for index in range(count)]


def mask(environment: dict[str, str] | None = None) -> str:
    """Show CUDA_VISIBLE_DEVICES as it is."""
    value = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    return "CUDA_VISIBLE_DEVICES is not set" if value is None else f"CUDA_VISIBLE_DEVICES is {value!r}"


def visibility() -> Finding:
    """Set what CUDA_VISIBLE_DEVICES says beside what torch sees."""
    import torch

    seen = visible_gpus()
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    detail = f"{mask()}; torch sees {seen} GPU{'' if seen == 1 else 's'}"
    built = torch.version.cuda or torch.version.hip
    if built and seen == 0 and value is not None and value.strip() not in ("", "-1"):
        return Finding("visible devices", "warn", detail, "names or numbers there match no GPU of this machine")
    return Finding("visible devices", "ok", detail)


def _gpu(index: int) -> Finding:
    import torch

    name = f"gpu {index}"
    try:
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        return Finding(name, "fail", str(error).splitlines()[0], "is another process using it alone, or is it broken?")
    detail = (
        f"{facts.name}, {total / _GIB:.1f} GiB ({free / _GIB:.1f} free),"
        f" compute capability {facts.major}.{facts.minor}, driver {driver_version(_DRIVER)}"
    )
    if torch.version.cuda and not runs_on(torch.cuda.get_arch_list(), facts.major, facts.minor):
        hint = "install a torch that is built for this GPU"
        return Finding(name, "fail", f"{detail}; torch is built for {', '.join(torch.cuda.get_arch_list())}", hint)
    if free < total / 2:
        return Finding(name, "warn", detail, "more than half of its memory is in use: see nvidia-smi")
    return Finding(name, "ok", detail)


def runs_on(architectures: Sequence[str], major: int, minor: int) -> bool:
    """Say whether code for ``architectures`` (sm_90, compute_75 ...) runs on compute capability major.minor.

    Machine code (sm) runs on the same major version from its minor one up; PTX (compute) on anything newer.
    """
    for name in architectures:
        kind, _, number = name.partition("_")
        digits = re.match(r"\d+", number)
        if digits is None:
            continue
        built = divmod(int(digits[0]), 10)
        if kind == "sm" and built[0] == major and built[1] <= minor:
            return True
        if kind == "compute" and built <= (major, minor):
            return True
    return False


def driver_version(file: Path) -> str:
    """Read the version of the NVIDIA driver from the kernel's own file."""
    if not file.is_file():
        return "unknown"
    number = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", file.read_text(encoding="utf-8", errors="replace"))
    return number[0] if number else "unknown"


def backends() -> Finding:
    """Say which of gloo (CPU) and NCCL (GPU) this torch carries."""
    import torch.distributed as dist

    if not dist.is_available():
        return Finding("backends", "fail", "torch.distributed is not in this build of torch", "install another torch")
    here = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    detail = ", ".join(f"{name}: {'there' if there else 'not there'}" for name, there in here.items())
    needed = "nccl" if visible_gpus() else "gloo"
    if not here[needed]:
        return Finding("backends", "fail", detail, f"several ranks need {needed}; install a torch that has it")
    return Finding("backends", "ok", detail + _nccl_version(here["nccl"]))


def _nccl_version(there: bool) -> str:
    if not there:
        return ""
    import torch.cuda.nccl

    parts = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return f" ({'.'.join(str(part) for part in parts)})"
