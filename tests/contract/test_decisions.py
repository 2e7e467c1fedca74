"""What one rank wishes or sees is decided by all alike (B40)."""

from __future__ import annotations

import pytest

from support.ranks import run_ranks


def hear(rank: int, world: int, saves: int, stops: int) -> tuple[bool, bool, bool]:
    """Let one rank wish to save and one to stop; return what this rank then does, and whether some rank failed."""
    from unisono import dist
    from unisono.outcome import Word, leave_out

    dist.join(dist.find_world(), 30)
    result = leave_out(lambda seconds: Word(save=rank == saves, stop=rank == stops))
    failed = dist.any_rank(rank == stops)
    dist.leave()
    return result.save_wanted, result.stop_wanted, failed


@pytest.mark.parametrize(("saves", "stops"), [(0, 1), (1, 0), (1, 1)])
def test_b40_all_ranks_do_the_same(saves: int, stops: int) -> None:
    """Anybody's wish to stop counts, and rank 0's clock alone says when to save: so nobody enters a save by himself."""
    everyone = run_ranks(hear, 2, saves, stops)
    assert everyone == [(saves == 0, True, True)] * 2
