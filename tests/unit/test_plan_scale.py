"""Links, and a run on many machines: formulas at known values, what must not get worse, tables and reasons in words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.sizes import LLAMA_2_7B
from unisono.config.load import load
from unisono.errors import ConfigError, LaunchError
from unisono.plan.architecture import architecture_of
from unisono.plan.exchange import Collective, exposed_seconds, program
from unisono.plan.hardware import DEVICES, find_device
from unisono.plan.links import NETWORKS, Cluster, Network, Team, find_network
from unisono.plan.memory import Load
from unisono.plan.scale import Curve, as_lines, curves, parse_nodes, verdict
from unisono.plan.time import seconds_of_update
from unit.test_plan import unisono, write_run

SHAPE = architecture_of(LLAMA_2_7B, where="here")
H100, NDR, SLOW = find_device("h100"), find_network("ib-ndr"), find_network("ethernet-10")
LOAD = Load(SHAPE, (1024,), 1024, is_half=True, ranks=64, strategy="fsdp2", on_gpu=True)


def cluster(machines: int = 8, gpus: int = 8, network: Network = NDR) -> Cluster:
    """Machines with H100s."""
    return Cluster(H100, gpus, machines, network)


def test_collectives_at_known_values() -> None:
    """Large ones are bytes over bandwidth: of n bytes (p - 1) / p n to gather, twice that to sum (Thakur et al.)."""
    one = cluster(machines=1)
    everyone = one.team("all", 8)
    gigabytes = 100 * 10**9
    assert one.seconds("all_gather", gigabytes, everyone) == pytest.approx(100 * 7 / 8 / 400, rel=1e-3)
    assert one.seconds("all_reduce", gigabytes, everyone) == pytest.approx(2 * 100 * 7 / 8 / 400, rel=1e-3)
    assert one.seconds("broadcast", gigabytes, everyone) == pytest.approx(100 / 400, rel=1e-3)
    slow = cluster(machines=4, network=SLOW)  # one adapter of 1.125 GB/s for all of a machine
    took = slow.seconds("all_gather", gigabytes, slow.team("all", 32))
    assert took == pytest.approx(100 * 31 / 32 / 1.125, rel=1e-3)
    # small ones are latency: NCCL's LL protocol, 6.6 us and 7 steps of 0.6
    assert one.seconds("all_gather", 8, everyone) == pytest.approx(10.8e-6, rel=1e-3)
    assert one.seconds("all_reduce", 8, Team(1, 1, 1)) == 0.0
    # over 128 machines a sum goes by a tree: 6.8 us, 14 steps of 0.6 and 14 of 5.0; a ring would take 2,046 steps
    many = cluster(machines=128)
    assert many.seconds("all_reduce", 8, many.team("all", 1024)) == pytest.approx((6.8 + 8.4 + 70) * 1e-6, rel=1e-3)


def test_teams_of_hybrid_sharding() -> None:
    """A copy of the model in each machine: copies meet over the network, eight teams side by side."""
    whole = cluster(machines=16)
    assert whole.team("parts", 8) == Team(8, 1, 1)
    assert whole.team("copies", 8) == Team(16, 16, 8)
    assert whole.team("parts", 16) == Team(16, 2, 1) and whole.team("copies", 16) == Team(8, 8, 8)
    assert whole.team("parts", 4) == Team(4, 1, 1) and whole.team("copies", 4) == Team(32, 16, 4)
    assert whole.bytes_per_second(whole.team("copies", 8)) == pytest.approx(45e9)
    with pytest.raises(ConfigError, match="copies of the model over 6 ranks each do not divide machines of 8"):
        whole.team("parts", 6)


@settings(max_examples=60)
@given(
    kind=st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "broadcast"]),
    size=st.integers(1, 10**11),
    machines=st.sampled_from([1, 2, 4, 16, 128]),
    network=st.sampled_from(sorted(NETWORKS)),
)
def test_more_bytes_take_longer_and_better_links_do_not(kind: str, size: int, machines: int, network: str) -> None:
    here = cluster(machines=machines, network=NETWORKS[network])
    team = here.team("all", 1)
    took = here.seconds(kind, size, team)
    assert took > 0 and here.seconds(kind, 2 * size, team) > took
    wider = replace(here, network=replace(here.network, gb_per_second=2 * here.network.gb_per_second))
    assert wider.seconds(kind, size, team) <= took
    assert replace(here, device=replace(H100, link_gb_per_second=900)).seconds(kind, size, team) <= took
    if kind == "all_reduce":
        both = here.seconds("all_gather", size, team) + here.seconds("reduce_scatter", size, team)
        assert took <= both + 2 * (14e-6 + here.network.latency_seconds), "NCCL counts two steps more between machines"


@settings(max_examples=25)
@given(
    strategy=st.sampled_from(["ddp", "fsdp2"]),
    machines=st.sampled_from([1, 2, 16]),
    shard_ranks=st.sampled_from([None, 8]),
    lora=st.sampled_from([None, 16]),
    is_half=st.booleans(),
    num_micro=st.integers(1, 6),
)
def test_a_wider_network_never_slows_an_update(
    strategy: str, machines: int, shard_ranks: int | None, lora: int | None, is_half: bool, num_micro: int
) -> None:
    run = replace(LOAD, strategy=strategy, ranks=8 * machines, lora_rank=lora, is_half=is_half, shard_ranks=shard_ranks)
    narrow, wide = (
        seconds_of_update(run, H100, num_micro=num_micro, cluster=cluster(machines, network=each)).exchange
        for each in (SLOW, replace(SLOW, gb_per_second=100.0))
    )
    assert 0 <= wide <= narrow * (1 + 1e-9)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("always", [False, True])
def test_many_micro_batches_are_not_played_one_by_one(strategy: str, always: bool) -> None:
    here, run = cluster(), replace(LOAD, strategy=strategy, exchanges_always=always)

    def cost(collective: Collective) -> tuple[str, float]:
        return "wire", here.seconds(collective.kind, collective.num_bytes, here.team(collective.among, run.parts))

    three, four, nine = (exposed_seconds(program(run, num_micro=num), lambda what: 1e-3, cost) for num in (3, 4, 9))
    assert nine == pytest.approx(four + 5 * (four - three))


def curves_of(folder: Path, *overrides: str, nodes: str = "1..128", network: Network = NDR) -> list[Curve]:
    """Curves of a 7B with LoRA on machines of eight H100."""
    file = write_run(folder, model={"lora": {}}, precision={"weights": "bf16"}, batch={"global_size": 256})
    return curves(load(file, list(overrides)).config, SHAPE, H100, 8, network, parse_nodes(nodes))


def test_one_machine_is_what_the_plan_for_one_machine_says(tmp_path: Path) -> None:
    from unisono.plan.fit import choices

    config = load(write_run(tmp_path, strategy={"name": "ddp"}, model={"lora": {}}), []).config
    (curve,) = curves(config, SHAPE, H100, 8, NDR, [1])
    assert [row.efficiency for row in curve.rows] == [1.0]
    best = choices(config, SHAPE, H100, 8)[0]
    assert curve.rows[0].tokens_per_second == pytest.approx(best.seconds.tokens_per_second)
    assert curve.rows[0].choice.peak == best.peak


def test_curves_fall_and_say_where_they_break(tmp_path: Path) -> None:
    found = curves_of(tmp_path)
    assert [curve.name for curve in found] == ["ddp", "fsdp2", "fsdp2 strategy.shard_ranks=8"]
    for curve in found:
        assert [row.cluster.machines for row in curve.rows] == [1, 2, 4, 8, 16, 32, 64, 128]
        assert curve.rows[0].efficiency == 1.0
        assert [row.samples for row in curve.rows] == [32, 16, 8, 4, 2, 1, 1, 1]
        for row in curve.rows:
            assert row.efficiency <= 1 + 1e-9 and 0 <= row.communication < 1
    ddp = found[0]
    assert ddp.break_row is not None and ddp.break_row.cluster.machines == 64
    assert verdict(ddp).endswith("256 samples are too few for 512 GPUs: 256 have none")
    assert "it breaks at 64 machines (" in verdict(ddp)


def test_each_cause_is_named(tmp_path: Path) -> None:
    slow = curves_of(tmp_path, "strategy.name=fsdp2", network=SLOW)[0]
    assert "it breaks at 2 machines" in verdict(slow) and "GPUs wait for communication in" in verdict(slow)
    uneven = curves_of(tmp_path, "strategy.name=ddp", "batch.global_size=80", nodes="8")[0]
    assert verdict(uneven).endswith("80 samples do not divide evenly among 64 GPUs: some have 2, some fewer")
    few = curves_of(tmp_path, "strategy.name=ddp", nodes="1..4")[0]
    assert verdict(few) == "80% or more up to 4 machines"


def test_hybrid_sharding_keeps_its_gathers_off_the_network(tmp_path: Path) -> None:
    whole, hybrid = curves_of(tmp_path, "strategy.name=fsdp2", network=SLOW)
    assert all(a.efficiency < b.efficiency for a, b in zip(whole.rows[1:], hybrid.rows[1:], strict=True))
    (chosen,) = curves_of(tmp_path, "strategy.name=fsdp2", "strategy.shard_ranks=16", nodes="1..4")
    assert [row.choice.load.parts for row in chosen.rows] == [8, 16, 16]


def test_the_table(tmp_path: Path) -> None:
    config = load(write_run(tmp_path, strategy={"name": "ddp"}), []).config
    found = curves(config, SHAPE, find_device("rtx-3090"), 4, find_network("ethernet-10"), [1, 2])
    lines = list(as_lines(found, config))
    assert "machines of 4 x rtx-3090, ethernet-10 between them" in lines[0]
    assert "1.12 GB/s for each machine" in lines[1] and "stays 64 samples of 1024 tokens" in lines[2]
    assert lines[4] == "ddp (efficiency against one machine, where it does not fit)"
    assert lines[5].split() == [
        "machines",
        "GPUs",
        "samples/GPU",
        "tokens/s",
        "efficiency",
        "waiting",
        "GiB",
        "a",
        "rank",
    ]
    assert lines[6].split()[:3] == ["1", "4", "16"] and "does not fit: " in lines[6]
    assert lines[-1] == "it fits on none of them"


@pytest.mark.parametrize(("text", "numbers"), [("16", [16]), ("1..8", [1, 2, 4, 8]), ("3..20", [3, 6, 12, 20])])
def test_numbers_of_machines(text: str, numbers: list[int]) -> None:
    assert parse_nodes(text) == numbers


@pytest.mark.parametrize("text", ["", "0", "4..2", "1..", "two", "1..9999", "-1"])
def test_what_is_no_number_of_machines_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="--nodes"):
        parse_nodes(text)


def test_the_command(tmp_path: Path) -> None:
    file = str(write_run(tmp_path, model={"lora": {}}))
    arguments = ["plan", file, "--device", "h100", "--gpus", "8", "--nodes", "1..4"]
    told = unisono(*arguments)
    assert told.returncode == 0 and "80% or more up to 4 machines" in told.stdout, told.stderr
    answer: dict[str, Any] = json.loads(unisono(*arguments, "--network", "ethernet-25", "--json").stdout)
    assert answer["network"]["name"] == "ethernet-25"
    assert [row["nodes"] for row in answer["curves"][0]["nodes"]] == [1, 2, 4]
    wrong = unisono(*arguments, "--network", "ib-ndt")
    assert wrong.returncode == 2 and "did you mean ib-ndr?" in wrong.stderr
    none = unisono(
        "plan", file, "model.lora=null", "strategy.name=ddp", "--device", "rtx-3090", "--gpus", "8", "--nodes", "2"
    )
    assert none.returncode == 1 and "it fits on none of them" in none.stdout


def test_networks_have_sources() -> None:
    assert all(network.source and network.gb_per_second > 0 for network in NETWORKS.values())
    assert {device.link_gb_per_second < 64 for device in DEVICES.values()} == {True, False}
