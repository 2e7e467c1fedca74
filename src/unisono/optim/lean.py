"""AdamW with moments of one or two bytes a value, the same on any number of ranks; parameters may be cut into parts.

8 bits (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization"): a byte for each value, and a scale in
fp32 for each block of ``BLOCK`` values, by bitsandbytes' kernels. Blocks lie within rows, so that no cut between ranks
goes through one; where rows are no whole blocks, and in small parameters, moments stay in fp32.

bf16: the second moment changes by a thousandth an update, less than bf16 can tell apart, so it is rounded up or down
at random, with the odds that keep the mean (Gupta et al. 2015). What is drawn for a value follows from seed, update and
its place in the whole parameter: a rank that has a part of it draws the same. Weights in bf16 are rounded so, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from unisono.bits import bitsandbytes
from unisono.dist import first_row

LEAST, BLOCK = 4096, 256  # values: of a parameter whose moments have 8 bits, and of a block of them
PIECE = 2**22  # values that are worked on at a time: what is made on the way takes little memory
MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALE = "_scale"
_WORD = 0xFFFFFFFF


class LeanAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) with ``moments`` of ``torch.uint8`` or ``torch.bfloat16``."""

    def __init__(self, groups: list[dict[str, Any]], *, moments: torch.dtype, seed: int, **defaults: Any) -> None:
        super().__init__(groups, defaults)
        self._dtype, self._seed = moments, seed
        every = (parameter for group in self.param_groups for parameter in group["params"])
        self._places = {parameter: place for place, parameter in enumerate(every, 1)}
        self._maps: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state |= {"step": torch.tensor(0.0), **empty_moments(parameter, self._dtype)}
        values, gradient = _local(parameter), _local(parameter.grad)
        moments = {name: _local(each) for name, each in state.items() if name != "step"}
        kind = state[MOMENTS[0]].dtype
        if kind == torch.float32:
            _in_fp32(values, gradient, moments, state["step"], group)
            return
        state["step"] += 1
        step = int(state["step"])
        if kind == torch.uint8:
            self._in_8_bits(values, gradient, moments, step, group)
            return
        key = _mixed(self._seed + step * 0x9E3779B1 + self._places[parameter] * 0x85EBCA77)
        first = first_row(parameter) * (parameter[0].numel() if parameter.ndim else 1)
        _in_bf16(values, gradient, moments, step, group, key=key, first=first)

    def _in_8_bits(
        self,
        values: torch.Tensor,
        gradient: torch.Tensor,
        moments: dict[str, torch.Tensor],
        step: int,
        group: dict[str, Any],
    ) -> None:
        (beta1, beta2), signed, unsigned = group["betas"], *self._maps_on(values.device)
        first, second = (moments[name].view(-1) for name in MOMENTS)
        scales = [moments[name + _SCALE].view(-1) for name in MOMENTS]
        values, gradient = values.view(-1), gradient.contiguous().view(-1)
        for piece in _pieces(values.numel()):
            blocks = slice(piece.start // BLOCK, piece.stop // BLOCK)
            bitsandbytes().functional.optimizer_update_8bit_blockwise(
                "adam", gradient[piece], values[piece], first[piece], second[piece], beta1, beta2, 0.0, 0.0,
                group["eps"], step, group["lr"], signed, unsigned, scales[0][blocks], scales[1][blocks],
                group["weight_decay"],
            )  # fmt: skip

    def _maps_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return which number each of the 256 bytes stands for, in the first moment and in the second."""
        if device not in self._maps:
            create = bitsandbytes().functional.create_dynamic_map
            self._maps[device] = (create(signed=True).to(device), create(signed=False).to(device))
        return self._maps[device]


def is_in_blocks(shape: torch.Size) -> bool:
    """Tell whether the moments of a parameter of this whole shape have 8 bits."""
    return shape.numel() >= LEAST and shape[-1] % BLOCK == 0


def empty_moments(parameter: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return zero moments, as state_dict names them: where the parameter lies, and cut as it is."""
    like = parameter.detach()
    if dtype == torch.bfloat16:
        return {name: torch.zeros_like(like, dtype=dtype) for name in MOMENTS}
    if not is_in_blocks(parameter.shape):
        return {name: torch.zeros_like(like, dtype=torch.float32) for name in MOMENTS}
    bytes_ = {name: torch.zeros_like(like, dtype=torch.uint8) for name in MOMENTS}
    return bytes_ | {name + _SCALE: torch.zeros_like(like[..., ::BLOCK], dtype=torch.float32) for name in MOMENTS}


def _in_fp32(
    values: torch.Tensor,
    gradient: torch.Tensor,
    moments: dict[str, torch.Tensor],
    step: torch.Tensor,
    group: dict[str, Any],
) -> None:
    """Leave it to torch."""
    first, second = (moments[name] for name in MOMENTS)
    beta1, beta2 = group["betas"]
    adamw(
        [values], [gradient], [first], [second], [], [step], foreach=False, amsgrad=False, maximize=False,
        beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
    )  # fmt: skip


def _in_bf16(
    values: torch.Tensor,
    gradient: torch.Tensor,
    moments: dict[str, torch.Tensor],
    step: int,
    group: dict[str, Any],
    *,
    key: int,
    first: int,
) -> None:
    (beta1, beta2), rate = group["betas"], group["lr"]
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    flat = [each.view(-1) for each in (values, *(moments[name] for name in MOMENTS))]
    gradient = gradient.contiguous().view(-1)
    for piece in _pieces(values.numel()):
        weight, mean, square = (each[piece].float() for each in flat)
        grad = gradient[piece].float()
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        drawn = draw(key, first + piece.start, len(mean), grad.device)
        flat[1][piece] = round_at_random(mean, drawn & 0xFFFF)
        flat[2][piece] = round_at_random(square, drawn >> 16)
        weight.mul_(1 - rate * group["weight_decay"])
        weight.addcdiv_(mean, (square / correction2).sqrt_().add_(group["eps"]), value=-rate / correction1)
        is_half = flat[0].dtype == torch.bfloat16
        flat[0][piece] = round_at_random(weight, _scramble(drawn) & 0xFFFF) if is_half else weight


def round_at_random(values: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Round fp32 to bf16, away from zero if the bits that go, plus 16 ``drawn`` ones, are more than 16 bits hold."""
    bits = values.view(torch.int32) + drawn.to(torch.int32)
    return (bits & -0x10000).view(torch.float32).bfloat16()


def draw(key: int, first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return 32 random bits (int64) for each of ``count`` places from ``first`` on: they follow from place and key."""
    places = torch.arange(first, first + count, dtype=torch.int64, device=device)
    return _scramble((places ^ (places >> 32)) * 0x9E3779B1 + key)


def _scramble(bits: torch.Tensor) -> torch.Tensor:
    """Mix 32 bits so that each decides about all (the finalizer of MurmurHash3, Appleby 2011)."""
    bits = bits & _WORD
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & _WORD
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & _WORD
    return bits ^ (bits >> 16)


def _mixed(number: int) -> int:
    return int(_scramble(torch.tensor(number & _WORD)))


def _pieces(count: int) -> Iterator[slice]:
    for start in range(0, count, PIECE):
        yield slice(start, min(start + PIECE, count))


def _local(tensor: Any) -> torch.Tensor:
    """Return this rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
