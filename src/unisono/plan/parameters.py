"""A decoder's parameters one by one, since it is by tensors that gradients are put in buckets and weights are cut.

``tests/unit/test_plan_exchange.py`` compares shapes with transformers' models, and orders with real backwards. Families
beside Llama have the same tensors; the order of their gradients was compared with nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unisono.plan.memory import FP32, HALF, Load


@dataclass(frozen=True)
class Parameter:
    """One tensor: ``rows`` are its first dimension, by which fsdp2 cuts; ``row`` the values in each."""

    rows: int
    row: int
    value_bytes: int
    is_linear: bool  # of a linear layer, which multiplies in half precision
    is_trained: bool

    @property
    def num_bytes(self) -> int:
        """Bytes as it is kept."""
        return self.rows * self.row * self.value_bytes

    def padded(self, parts: int) -> int:
        """Return its values when ``parts`` ranks hold equally many rows: the last ones are filled up."""
        return -(-self.rows // parts) * parts * self.row


_LATE_TO_EARLY = (
    "down_proj",
    "up_proj",
    "gate_up_proj",
    "gate_proj",
    "o_proj",
    "v_proj",
    "k_proj",
    "q_proj",
    "qkv_proj",
)


def block_parameters(load: Load) -> list[Parameter]:
    """Return a block's parameters in the order in which backward makes their gradients: the last used, first."""
    shape, is_trained = load.architecture, load.lora_rank is None
    linear = shape.linear()
    targets = {} if is_trained else shape.linear(load.lora_targets)
    norm = Parameter(shape.hidden, 1, load.weight_bytes, False, is_trained)
    found = [norm] * (shape.norms // 2 - 1)
    for name in _LATE_TO_EARLY:
        if name == "o_proj":
            found += _experts(load) + [norm] * (shape.norms // 2)
        if name in linear:
            found += _layer(load, name, *linear[name])
        if name in targets:
            found += _adapters(load, *targets[name])
        if shape.qk_norm and name in ("k_proj", "q_proj"):
            found.append(Parameter(shape.head, 1, load.weight_bytes, False, is_trained))
    return [*found, norm]


def _layer(load: Load, name: str, inputs: int, outputs: int) -> Iterator[Parameter]:
    shape, is_trained = load.architecture, load.lora_rank is None
    has_bias = shape.mlp_bias if name.startswith(("gate", "up", "down")) else shape.attention_bias
    if shape.output_bias if name == "o_proj" else has_bias:
        yield Parameter(outputs, 1, load.weight_bytes, True, is_trained)
    yield Parameter(outputs, inputs, load.weight_bytes, True, is_trained)


def _adapters(load: Load, inputs: int, outputs: int) -> list[Parameter]:
    assert load.lora_rank is not None
    return [
        Parameter(outputs, load.lora_rank, FP32, True, True),
        Parameter(load.lora_rank, inputs, FP32, True, True),
    ]


def _experts(load: Load) -> list[Parameter]:
    """Down, gate with up, and the router of a mixture: transformers keeps the experts' matrices as one tensor each."""
    shape, is_trained = load.architecture, load.lora_rank is None
    if shape.experts == 1:
        return []
    h, f = shape.hidden, shape.intermediate
    rows = [(shape.experts, h * f), (shape.experts, 2 * f * h), (shape.experts, h)]
    return [Parameter(*size, load.weight_bytes, False, is_trained) for size in rows]


def root_parameters(load: Load) -> list[Parameter]:
    """Return what lies outside the blocks: head, last norm, embedding; of a tied pair the embedding alone."""
    shape, is_trained = load.architecture, load.lora_rank is None
    table = Parameter(shape.vocabulary, shape.hidden, load.weight_bytes, False, is_trained)
    norm = Parameter(shape.hidden, 1, load.weight_bytes, False, is_trained)
    return [norm, table] if shape.is_tied else [table, norm, table]


def gathered_bytes(parameter: Parameter, load: Load) -> int:
    """Return the bytes of a value as fsdp2 gathers it: linear layers in the format of their products."""
    return HALF if load.is_half and parameter.is_linear else parameter.value_bytes


def reduced_bytes(parameter: Parameter, load: Load) -> int:
    """Return the bytes of a gradient's value as fsdp2 sums it: fp32 for linear layers that multiply in half."""
    return FP32 if load.is_half and parameter.is_linear else parameter.value_bytes
