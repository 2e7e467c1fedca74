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
