"""Parameters one by one, what an update sends, and how much of it work hides."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from support.sizes import LLAMA_2_7B
from unisono.plan.architecture import architecture_of
from unisono.plan.exchange import Collective, Gather, Reduce, Use, Wait, Work, collectives, exposed_seconds, program
from unisono.plan.memory import Load
from unisono.plan.parameters import block_parameters, root_parameters
from unit.test_plan_architecture import CASES, SMALL

SHAPE = architecture_of(LLAMA_2_7B, where="here")
FULL = Load(SHAPE, (1024,), 1024, is_half=True, ranks=64, strategy="fsdp2")


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_tensors_are_those_of_transformers(family: str, changes: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **(SMALL | changes))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    load = Load(architecture_of(config.to_dict(), where="here"), (1,), 1)
    head = model.get_output_embeddings()
    linear = {p for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head for p in m.parameters()}
    real = Counter((len(p), p.numel() // len(p), p in linear) for p in model.parameters())
    ours = block_parameters(load) * load.architecture.layers + root_parameters(load)
    assert Counter((each.rows, each.row, each.is_linear) for each in ours) == real


def test_a_7b_gathers_twice_what_it_has_and_reduces_it_once() -> None:
    """13.5 GB of bf16 (and fp32 where nothing is multiplied), for forward and backward; 27 GB of fp32 gradients."""
    sent = Counter[tuple[str, str]]()
    for each in collectives(FULL, num_micro=1):
        sent[each.kind, each.purpose] += each.num_bytes
    blocks, root = SHAPE.layers * SHAPE.block, SHAPE.parameters - SHAPE.layers * SHAPE.block
    norms = SHAPE.layers * 2 * 4096
    assert sent["all_gather", "weights"] == 2 * (2 * (blocks - norms) + 4 * norms) + 4 * root
    assert sent["reduce_scatter", "gradients"] == 4 * SHAPE.parameters
    assert sent["all_reduce", "norm"] == 8


def test_a_matrix_with_fewer_rows_than_ranks_is_filled_up() -> None:
    """LoRA's first matrix has as many rows as its rank: on 64 ranks four times what it holds travels."""
    lora = replace(FULL, lora_rank=16)
    few, many = (
        sum(
            each.num_bytes for each in collectives(replace(lora, ranks=ranks), num_micro=1) if each.kind == "all_gather"
        )
        for ranks in (16, 64)
    )
    rows = sum(inputs for inputs, _ in SHAPE.linear().values())
    assert many - few == 2 * SHAPE.layers * 2 * rows * (64 - 16) + 8 * 6 * (64 - 16)


def test_ddp_sends_every_gradient_once_in_buckets() -> None:
    load = replace(FULL, strategy="ddp")
    sent = [each for each in collectives(load, num_micro=4) if each.purpose == "gradients"]
    assert sum(each.num_bytes for each in sent) == 4 * SHAPE.parameters
    assert all(each.num_bytes >= 25 * 2**20 for each in sent[:-1])
    larger = [each for each in collectives(load, num_micro=4, bucket_mib=400) if each.purpose == "gradients"]
    assert len(larger) < len(sent) and all(each.num_bytes >= 400 * 2**20 for each in larger[:-1])


WEIGHTS, GRADIENTS = (Collective("any", 1, "parts", purpose) for purpose in ("weights", "gradients"))


def played(*items: Any, work: float = 10.0, sending: float = 1.0) -> float:
    """Exposed seconds of a program."""
    return exposed_seconds(iter(items), lambda what: work, lambda collective: ("wire", sending))


def test_what_work_hides_and_what_it_does_not() -> None:
    first, second = Gather(1, WEIGHTS), Gather(2, WEIGHTS)
    uses = [Use(number, in_forward=True) for number in (1, 2)]
    assert played(first, uses[0], Work("w"), second, uses[1], Work("w")) == 1.0, "only the first one is waited for"
    assert played(Work("w"), Reduce(GRADIENTS), Work("w")) == 0.0
    assert played(Work("w"), Reduce(GRADIENTS), Work("w"), Reduce(GRADIENTS)) == 1.0, "nothing comes after the last"
    assert played(Work("w"), Reduce(GRADIENTS), Work("w"), sending=25.0) == 15.0
    assert played(Work("w"), Wait(GRADIENTS), Work("w")) == 1.0
    back = [Use(number, in_forward=False) for number in (1, 2)]
    late = played(first, back[0], Work("w"), second, back[1], Work("w"))
    early = played(first, back[0], second, Work("w"), back[1], Work("w"))
    assert (early, late) == (1.0, 1.0), "the gate of backward opens when a group is taken, not when its work is done"


def test_backward_in_half_precision_waits_for_the_first_block_only() -> None:
    """A block has two groups then, and both are asked for a block ahead: torch itself would ask for the norms alone."""

    def cost(collective: Collective) -> tuple[str, float]:
        return "wire", 1.0 if collective.purpose == "weights" and collective.num_bytes > 2**24 else 0.0

    half, full = (
        exposed_seconds(program(replace(FULL, is_half=is_half), num_micro=1), lambda what: 2.0, cost)
        for is_half in (True, False)
    )
    assert half == pytest.approx(2) == full, (
        "root and the first block of forward; backward's first hides behind the head"
    )
