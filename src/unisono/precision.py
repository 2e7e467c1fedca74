"""Number formats: what is computed in which, and the loss scale of fp16."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from unisono.errors import ConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
START_SCALE = 65536.0


def multiplies_bf16(device: torch.device) -> bool:
    """Tell whether the hardware multiplies bf16 matrices (GPU with bf16, or CPU with AMX or AVX-512 BF16)."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # torch has no public names for them up to 2.13
    return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())


def choose(compute: str, device: torch.device, weights: str = "fp32") -> tuple[str, str]:
    """Resolve ``precision.compute`` for the device; returns the format and the reason, to be said aloud.

    fp16 on a CPU is refused: its products are emulated and its range needs a loss scale for nothing.
    """
    if compute == "fp16" and device.type == "cpu":
        raise ConfigError(
            "fp16 needs a GPU, and this run is on a CPU",
            where="precision.compute",
            hint="set precision.compute=auto (bf16 where the CPU multiplies it, else fp32)",
        )
    if compute != "auto":
        return compute, "as asked"
    if weights == "bf16":
        return "bf16", "auto: the weights are kept in bf16"
    hardware = "GPU" if device.type == "cuda" else "CPU"
    if multiplies_bf16(device):
        return "bf16", f"auto: this {hardware} multiplies bf16 in hardware"
    return "fp32", f"auto: this {hardware} does not multiply bf16 in hardware"


class Precision:
    """Autocast over fp32 weights, and for fp16 the loss scale: unscale, then clip, then step."""

    def __init__(self, compute: str, device: torch.device) -> None:
        self.compute = compute
        self._device = device
        self._scaler = torch.amp.GradScaler(device.type, init_scale=START_SCALE, enabled=compute == "fp16")

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of forward."""
        if self.compute == "fp32":
            return nullcontext()
        return torch.autocast(self._device.type, dtype=DTYPES[self.compute])

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply the loss before backward (fp16 only)."""
        return self._scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients back, once per update, before their norm is measured."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step with gradients that are finite on every rank; the loss scale may grow."""
        self._scaler.step(optimizer)
        self._scaler.update()

    def skip(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave this update out: forget the gradients; the loss scale backs off and begins to count anew.

        The caller decides by the global norm: with sharded gradients a rank's own share may look finite.
        """
        optimizer.zero_grad(set_to_none=True)
        if self._scaler.is_enabled():
            self._scaler.update(self._scaler.get_scale() * self._scaler.get_backoff_factor())
            self._scaler.load_state_dict(self._scaler.state_dict() | {"_growth_tracker": 0})

    def state(self) -> dict[str, float]:
        """Return scale and growth counter (empty unless fp16)."""
        return {k: float(v) for k, v in self._scaler.state_dict().items()}

    def restore(self, state: dict[str, float]) -> None:
        """Set scale and growth counter from a checkpoint."""
        if self._scaler.is_enabled() and state:
            counters = {"growth_interval", "_growth_tracker"}
            self._scaler.load_state_dict({k: int(v) if k in counters else v for k, v in state.items()})
