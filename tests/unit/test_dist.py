"""What ranks tell one another."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.ranks import run_ranks


def gathered(rank: int, world: int, folder: Path) -> list[str]:
    """Give a text of another length on each rank; nothing at all on rank 1."""
    from unisono import dist

    dist.join(dist.find_world(), 30)
    texts = dist.gather_texts(["ä" * 300, "", '{"a": 1}'][rank])
    dist.leave()
    return texts


@pytest.mark.timeout(60)
def test_texts_travel_whole(tmp_path: Path) -> None:
    for world in (1, 3):
        expected = ["ä" * 300, "", '{"a": 1}'][:world]
        assert run_ranks(gathered, world, tmp_path) == [expected] * world


def with_data(rank: int, world: int, folder: Path, keys: list[str]) -> str:
    """Say what data each rank has; return what it is told."""
    from unisono import dist
    from unisono.build import check_same_data
    from unisono.errors import DataError

    dist.join(dist.find_world(), 30)
    try:
        check_same_data(keys[rank])
    except DataError as error:
        return str(error)
    finally:
        dist.leave()
    return "same"


@pytest.mark.timeout(60)
def test_ranks_with_other_data_are_named_on_all(tmp_path: Path) -> None:
    assert run_ranks(with_data, 2, tmp_path, ["a", "a"]) == ["same"] * 2
    told = run_ranks(with_data, 3, tmp_path, ["a", "b", "a"])
    assert len(set(told)) == 1 and "1 of 3 ranks have other data than rank 0: rank 1" in told[0]
