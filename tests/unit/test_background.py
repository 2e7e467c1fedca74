"""Saving beside training: what is written is the copy, errors surface, and the stall is the copy alone (B52)."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.checkpoint import save as saving
from unisono.checkpoint.background import Background, Copies
from unisono.checkpoint.interval import (
    LEAST_COSTS,
    MEAN_SECONDS_BETWEEN_FAULTS,
    MOST_SECONDS,
    seconds_between_saves,
)
from unisono.checkpoint.load import load_checkpoint
from unisono.checkpoint.manifest import Manifest, newest_sound
from unisono.checkpoint.save import check_room, save_checkpoint, share_of
from unisono.dist import World
from unisono.errors import CheckpointError

ALONE = World(0, 1, 0, 1, torch.device("cpu"))


def save(folder: Path, update: int, tensors: dict[str, torch.Tensor], keep: int = 2) -> Path:
    return save_checkpoint(folder, tensors, Manifest(update, 0, 1, {}, {}), world=ALONE, keep=keep)


def test_what_is_written_is_the_state_at_the_save(tmp_path: Path) -> None:
    background, weight = Background(), torch.arange(4.0)

    def slow(tensors: dict[str, torch.Tensor]) -> None:
        time.sleep(0.2)
        save(tmp_path, 1, tensors)

    background.save({"w": weight}, slow)
    weight.add_(100)  # the next update
    background.wait()
    loaded = {"w": torch.zeros(4)}
    load_checkpoint(tmp_path / "update-00000001", loaded, world=ALONE)
    assert loaded["w"].tolist() == [0, 1, 2, 3] and background.seconds >= 0.2


def test_a_save_of_ten_megabytes_holds_training_up_for_less_than_50_ms() -> None:
    background, state = Background(), {str(k): torch.zeros(125_000, dtype=torch.float32) for k in range(20)}
    assert sum(each.nbytes for each in state.values()) == 10_000_000
    stalls = []
    for _ in range(5):
        background.wait()
        begin = time.perf_counter()
        background.save(state, lambda tensors: time.sleep(0.3))
        stalls.append(time.perf_counter() - begin)
    background.wait()
    assert sorted(stalls)[2] < 0.05, stalls


def test_b52_what_fails_beside_training_is_raised(tmp_path: Path) -> None:
    def fail(tensors: object) -> None:
        raise CheckpointError("no room")

    background = Background()
    background.save({}, fail)
    time.sleep(0.2)
    with pytest.raises(CheckpointError, match="no room"):
        background.check()
    background.check()
    background.save({}, fail)
    with pytest.raises(CheckpointError, match="no room"):
        background.save({}, lambda tensors: None)


def test_b54_a_full_disk_leaves_the_old_ones_and_says_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.zeros(2_000_000)}
    for update in (1, 2):
        save(tmp_path, update, state)
    usage = saving.shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(saving.shutil, "disk_usage", lambda _: usage._replace(free=5_000_000))
        with pytest.raises(CheckpointError, match=r"update 3 needs 8\.0 MB, 5\.0 MB are free") as met:
            save(tmp_path, 3, state)
        assert met.value.hint is not None and "make room" in met.value.hint
        with pytest.raises(OSError, match="needs 6,0"):
            check_room(tmp_path, 6_000_000_000, "all of it")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["update-00000001", "update-00000002"]
    assert newest_sound(tmp_path)[0] == tmp_path / "update-00000002"
    save(tmp_path, 3, state)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["update-00000002", "update-00000003"]


def test_b56_the_optimizer_comes_back_by_name(tmp_path: Path) -> None:
    """Two groups and a frozen layer, into a model whose parameters come in another order: update 11 is the same."""
    from unisono.config.schema import OptimSection
    from unisono.optim import build_optimizer
    from unisono.resume import collect, restore

    class Net(torch.nn.Module):
        def __init__(self, order: tuple[str, ...]) -> None:
            super().__init__()
            for name in order:
                self.add_module(name, torch.nn.Linear(4, 4))
            self.get_submodule("frozen").requires_grad_(False)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return self.last(self.frozen(self.first(values)))  # type: ignore[no-any-return,operator]

    def parts(order: tuple[str, ...]) -> tuple[Net, list[tuple[str, torch.nn.Parameter]], torch.optim.Optimizer]:
        net = Net(order)
        named = [(name, each) for name, each in net.named_parameters() if each.requires_grad]
        return net, named, build_optimizer(OptimSection(weight_decay=0.1, lr=0.01), named)

    def step(net: Net, optimizer: torch.optim.Optimizer, seed: int) -> None:
        optimizer.zero_grad()
        torch.manual_seed(seed)
        net(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()

    torch.manual_seed(0)
    net, named, optimizer = parts(("first", "frozen", "last"))
    for update in range(10):
        step(net, optimizer, update)
    state = {"update": 10, "epoch": 0}
    folder = save_checkpoint(tmp_path, collect(named, optimizer), Manifest(10, 0, 1, state, {}), world=ALONE, keep=2)
    other, its, again = parts(("last", "first", "frozen"))
    other.get_submodule("frozen").load_state_dict(net.get_submodule("frozen").state_dict())
    restore(folder, its, its, again, {}, allow_changes=[], world=ALONE)
    assert [int(each["step"]) for each in again.state.values()] == [10] * len(its)
    for model, its_optimizer in ((net, optimizer), (other, again)):
        step(model, its_optimizer, 10)
    after = dict(other.named_parameters())
    assert all(torch.equal(each, after[name]) for name, each in net.named_parameters())


def test_young() -> None:
    assert seconds_between_saves(0.0) == 0.0
    assert seconds_between_saves(0.5) == pytest.approx((2 * 0.5 * 3 * 3600) ** 0.5)
    assert seconds_between_saves(1000.0) == MOST_SECONDS


@given(cost=st.floats(0.001, 100), mean=st.floats(1, 1e6))
def test_frequent_faults_make_saves_frequent_and_never_most_of_the_work(cost: float, mean: float) -> None:
    interval = seconds_between_saves(cost, mean)
    assert interval <= seconds_between_saves(cost), "a run that fails seldom is no reason to save seldom"
    assert interval == MOST_SECONDS or interval >= LEAST_COSTS * cost
    if LEAST_COSTS * cost < interval < MOST_SECONDS and mean < MEAN_SECONDS_BETWEEN_FAULTS:
        assert interval == pytest.approx((2 * cost * mean) ** 0.5)


def test_copies_are_made_in_the_memory_of_the_ones_before() -> None:
    copies, weights = Copies(), {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    first = copies.take(weights)
    places = {name: each.data_ptr() for name, each in first.items()}
    assert not any(each.data_ptr() == weights[name].data_ptr() for name, each in first.items())
    weights["a"].add_(1)
    second = copies.take(weights)
    assert {name: each.data_ptr() for name, each in second.items()} == places
    assert all(torch.equal(second[name], weights[name]) for name in weights)
    grown = copies.take(weights | {"c": torch.zeros(1)})  # an optimizer that has more by now
    assert grown.keys() == {"a", "b", "c"} and torch.equal(grown["a"], weights["a"])
    other = copies.take({"a": torch.ones(5)})
    assert other.keys() == {"a"} and other["a"].shape == (5,)


@given(sizes=st.lists(st.integers(0, 1000), max_size=20), world=st.integers(1, 6))
def test_every_tensor_is_written_by_one_rank_and_the_work_is_shared(sizes: list[int], world: int) -> None:
    tensors = {f"t{place}": torch.zeros(size) for place, size in enumerate(sizes)}
    shares = [share_of(tensors, rank=rank, world=world) for rank in range(world)]
    assert sorted(name for share in shares for name in share) == sorted(tensors)
    loads = [sum(each.nbytes for each in share.values()) for share in shares]
    assert max(loads) - min(loads) <= 4 * max(sizes, default=0)


def test_nobody_saves_while_the_end_of_the_save_before_is_unknown() -> None:
    background, go_on = Background(), threading.Event()
    background.save({}, lambda _: go_on.wait(10))
    assert background.is_busy
    go_on.set()
    time.sleep(0.1)
    assert background.is_busy, "it has ended, and what it cost is not known yet"
    background.check()
    assert not background.is_busy and background.seconds > 0
