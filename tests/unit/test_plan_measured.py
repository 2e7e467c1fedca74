"""Seconds from what was measured: they move the right way, and add up to what was timed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.rates import made_up_rates
from support.sizes import LLAMA_2_7B
from unisono.plan.architecture import architecture_of
from unisono.plan.measured import seconds_measured
from unisono.plan.memory import Load

SHAPE = architecture_of({**LLAMA_2_7B, "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8}, where="")
RATES = {ranks: made_up_rates(ranks) for ranks in (1, 2)}


def total(load: Load, num_micro: int = 1) -> float:
    """Return the seconds of an update."""
    return seconds_measured(load, RATES[load.ranks], num_micro=num_micro).total


@settings(max_examples=60)
@given(
    documents=st.lists(st.integers(8, 600), min_size=1, max_size=4),
    is_half=st.booleans(),
    lora=st.one_of(st.none(), st.integers(1, 64)),
    checkpointing=st.booleans(),
    ranks=st.sampled_from([1, 2]),
)
def test_seconds_move_the_right_way(
    documents: list[int], is_half: bool, lora: int | None, checkpointing: bool, ranks: int
) -> None:
    load = Load(
        SHAPE,
        documents,
        sum(documents),
        is_half=is_half,
        lora_rank=lora,
        recompute="full" if checkpointing else "none",
        strategy="single" if ranks == 1 else "ddp",
        ranks=ranks,
    )
    seconds = seconds_measured(load, RATES[ranks], num_micro=1)
    assert all(value >= 0 for value in seconds.by_cause.values())
    assert seconds.tokens == sum(documents) * ranks
    assert total(replace(load, documents=[*documents, 64], targets=load.targets + 64)) > seconds.total
    assert total(replace(load, recompute="full")) >= seconds.total
    assert total(replace(load, architecture=replace(SHAPE, layers=5))) > seconds.total
    assert seconds.total < total(load, 2) <= 2 * seconds.total + 1
    if lora is None:
        assert total(replace(load, lora_rank=1, lora_targets=["q_proj"])) < seconds.total


def test_the_products_are_those_of_the_formula() -> None:
    """Where a product takes 1e-10 s a multiply-add and nothing else, seconds are flops / 2e10."""
    load = Load(SHAPE, (1000,), 1000)
    seconds = seconds_measured(load, RATES[1], num_micro=1)
    in_products = 6.0 * (SHAPE.layers * SHAPE.matrices + SHAPE.embedding) * 1000
    assert seconds.products == pytest.approx(in_products / 2 * 1e-10, rel=0.02)


def test_an_exchange_takes_what_was_measured_and_hides_nowhere_on_a_cpu() -> None:
    load = Load(SHAPE, (100,), 100, strategy="ddp", ranks=2)
    seconds = seconds_measured(load, RATES[2], num_micro=3)
    assert seconds.exchange == pytest.approx(1e-9 * load.trained_bytes, rel=0.1)
    assert seconds_measured(replace(load, strategy="single", ranks=1), RATES[1], num_micro=3).exchange == 0


def test_what_is_left_beside_the_operations_grows_with_the_layers() -> None:
    load = Load(SHAPE, (100,), 100)
    short, deep = (
        seconds_measured(replace(load, architecture=replace(SHAPE, layers=layers)), RATES[1], num_micro=1)
        for layers in (4, 40)
    )
    assert deep.overhead >= short.overhead > 0


def test_the_planner_says_how_a_bucket_is() -> None:
    from unisono.config.schema import StrategySection
    from unisono.plan.measured import BUCKET_BYTES

    assert StrategySection().bucket_mib * 2**20 == BUCKET_BYTES
