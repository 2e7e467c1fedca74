"""What devices have and can do: memory, dense peak of products, bandwidths, power; vendors' figures.

``memory`` is what a framework sees of it, a little less than what is sold. ``half`` and ``fp32``: dense TFLOPS, half
with fp32 sums, without sparsity (GeForce cards do those at half the rate of fp16 sums). ``link``: to its neighbours in
one machine, one direction, what copies reach of what the vendor names.

Each row names the vendor's document. Its figures were looked up again in December 2026, mostly in texts that quote the
document's table. Not found there: the rates with fp32 sums of the RTX 3090 and 5090 (taken as half of those with fp16
sums), fp32 of the MI300X, and what a framework sees of a GeForce's or an H200's memory. Links are 78 to 92 % of the
vendors' figures, by our assumption. Corrected then: A10G 35 TFLOPS of fp32 (31.2 is the A10's), B200 7,700 GB/s.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from unisono.errors import LaunchError
from unisono.plan.machine import Rates

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One accelerator, or this machine's CPU. ``has_bf16``: it multiplies bf16, else half is fp16.

    ``rates``: what was measured here; without them and without a data sheet (``half_tflops`` 0) there are no seconds.
    """

    name: str
    memory_gib: float
    half_tflops: float
    fp32_tflops: float
    memory_gb_per_second: float
    link_gb_per_second: float
    watts: int
    source: str
    has_bf16: bool = True
    is_gpu: bool = True
    rates: Rates | None = None

    @property
    def memory_bytes(self) -> int:
        """Its memory."""
        return int(self.memory_gib * GIB)


_PCIE4, _PCIE5 = 25.0, 50.0  # GB/s of 16 lanes that copies reach, of 32 and 64 in theory
_DEVICES = [
    Device("rtx-3090", 23.7, 71, 35.6, 936, _PCIE4, 350, "NVIDIA Ampere GA102 architecture paper v2, appendix A"),
    Device("rtx-4090", 23.6, 165, 82.6, 1008, _PCIE4, 450, "NVIDIA Ada GPU architecture paper v2.01, appendix A"),
    Device("rtx-5090", 31.4, 209, 104.8, 1792, _PCIE5, 575, "NVIDIA RTX Blackwell GPU architecture paper, appendix A"),
    Device("a10g", 22.1, 70, 35, 600, _PCIE4, 300, "NVIDIA A10G data sheet for AWS G5 (2022), specifications"),
    Device("l4", 22.0, 121, 30.3, 300, _PCIE4, 72, "NVIDIA L4 data sheet, specifications; half of 242 with sparsity"),
    Device("l40s", 44.4, 362, 91.6, 864, _PCIE4, 350, "NVIDIA L40S data sheet, specifications: 362.05 dense"),
    Device(
        "v100-16", 15.8, 125, 15.7, 900, 130, 300, "NVIDIA V100 data sheet, SXM2; 6 NVLinks of 25 GB/s", has_bf16=False
    ),
    Device(
        "v100-32", 31.7, 125, 15.7, 900, 130, 300, "NVIDIA V100 data sheet, SXM2; 6 NVLinks of 25 GB/s", has_bf16=False
    ),
    Device("a100-40", 39.4, 312, 19.5, 1555, 270, 400, "NVIDIA A100 data sheet, SXM 40 GB; NVLink 300 GB/s"),
    Device("a100-80", 79.2, 312, 19.5, 2039, 270, 400, "NVIDIA A100 data sheet, SXM 80 GB; NVLink 300 GB/s"),
    Device("h100", 79.1, 989, 67, 3350, 400, 700, "NVIDIA H100 data sheet, SXM: half of 1,979; NVLink 450 GB/s"),
    Device("h200", 139.8, 989, 67, 4800, 400, 700, "NVIDIA H200 data sheet, SXM: half of 1,979; NVLink 450 GB/s"),
    Device(
        "b200", 178.3, 2250, 75, 7700, 800, 1000, "NVIDIA Blackwell data sheet, HGX B200: half of 4,500; NVLink 900"
    ),
    Device("mi300x", 191.5, 1307, 163.4, 5300, 350, 750, "AMD Instinct MI300X data sheet; 7 links of 64 GB/s"),
]
DEVICES = {device.name: device for device in _DEVICES}


def find_device(name: str) -> Device:
    """Return the device called ``name``. Raises LaunchError with the nearest name for an unknown one."""
    wanted = name.lower().replace("_", "-").replace(" ", "-")
    if wanted in DEVICES:
        return DEVICES[wanted]
    near = [known for known in DEVICES if known.startswith(wanted)] or difflib.get_close_matches(wanted, DEVICES, n=1)
    raise LaunchError(
        f"--device {name}: its figures are not known; those of {', '.join(DEVICES)} are",
        hint=f"did you mean {' or '.join(near)}?" if near else None,
    )


def of_name(name: str, memory_bytes: int) -> Device:
    """Return a GPU that torch or the driver calls ``name``: its data sheet's figures, with the memory it really has.

    One that is not in the table has an rtx-3090's figures, to compare choices by: they differ by ratios alone.
    """
    words, gib = set(re.findall("[a-z0-9]+", name.lower())), memory_bytes / GIB
    for device in _DEVICES:
        model = re.sub(r"-(16|32|40|80)$", "", device.name)  # a memory size tells two of a name apart
        if set(model.split("-")) <= words and abs(device.memory_gib / gib - 1) < 0.1:
            return replace(device, memory_gib=gib)
    like = DEVICES["rtx-3090"]
    return replace(like, name=name, memory_gib=gib, source=f"speed unknown, taken as that of {like.name}")
