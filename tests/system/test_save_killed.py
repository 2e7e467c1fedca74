"""SIGKILL or an error at every point of a save and of a recovery: what is complete is gone on from (B51, B54)."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.killing import Deeds, watch_save
from support.ranks import RankFailed, free_port, run_ranks
from support.runs import assert_same_weights, checkpoint_names, make_run, run_training, train_whole, updates_of

PUBLISHED = "rename checkpoints/update-00000002"
ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES)
MOVED_ASIDE = "rename checkpoints/.update-00000002.old"


def train_watched(
    rank: int, world: int, file: Path, folder: Path, victim: int = 0, fatal: int | None = None, tear: bool = False
) -> list[str]:
    """Train; note what this rank does to ``folder`` in the save of update 2; the victim dies at deed ``fatal``."""
    from unisono.saving import Saver

    deeds = Deeds(folder, fatal if rank == victim else None, tear=tear)
    Saver.save = watch_save(deeds, 2)  # type: ignore[method-assign]
    run_training(rank, world, file, (f"run.output_dir={folder}",))
    return deeds.names


def resume_all(rank: int, world: int, file: Path, folders: Sequence[Path], ports: Sequence[int]) -> list[str]:
    """Resume every folder to its end, one after the other; returns what was said about each."""
    said = []
    for folder, port in zip(folders, ports):
        os.environ["MASTER_PORT"] = str(port)
        said.append(run_training(rank, world, file, (f"run.output_dir={folder}",)))
    return said


def fork_deaths(
    rank: int, world: int, file: Path, run: Path, states: Path, ways: Sequence[tuple[int, bool]], errors: bool = False
) -> list[int]:
    """Die in each of the ways in the save of update 2, in forked children (of a world of one).

    What each leaves behind is kept in ``states``; the next one finds the folder as the save found it. With ``errors``
    none dies: the deed fails, with another error each time. Returns the exit codes: 0 if the save went well all the
    same, 1 if it raised.
    """
    from unisono.saving import Saver

    save, checkpoints = Saver.save, run / "checkpoints"
    codes = []

    def save_in_children(self: Saver, state: Any, *, wait: bool) -> None:
        if state.update == 2:
            shutil.copytree(checkpoints, states / "before")
            for fatal, tear in ways:
                codes.append(_fork(watched_save, self, state, fatal, tear))
                assert codes[-1] in ((0, 1) if errors else (-9,)), f"deed {fatal}"
                shutil.copytree(run, states / state_name(fatal, tear))
                shutil.rmtree(checkpoints)
                shutil.copytree(states / "before", checkpoints)
        save(self, state, wait=wait)

    def watched_save(saver: Saver, state: Any, fatal: int, tear: bool) -> None:
        Deeds(run, fatal, tear=tear, error=ERRORS[fatal % len(ERRORS)] if errors else 0).watching = True
        save(saver, state, wait=True)

    Saver.save = save_in_children  # type: ignore[method-assign]
    run_training(rank, world, file, (f"run.output_dir={run}",))
    return codes


def fork_recoveries(rank: int, world: int, file: Path, start: Path, states: Path) -> list[tuple[str, int, int]]:
    """Go on with a copy of ``start``, and be hit at every deed before the first update, in forked children.

    Each deed is fatal once, and fails once. Returns the deeds, and how the children ended.
    """
    from unisono.journal import Journal

    begin = Journal.__init__

    def recover(folder: Path, deeds: Deeds, names: Path) -> None:
        def begin_unwatched(*args: Any, **kwargs: Any) -> None:
            deeds.watching = False
            names.write_text("\n".join(deeds.names))
            begin(*args, **kwargs)

        Journal.__init__ = begin_unwatched  # type: ignore[method-assign]
        deeds.watching = True
        run_training(rank, world, file, (f"run.output_dir={folder}",))

    def hit(name: str, fatal: int | None, error: int) -> int:
        shutil.copytree(start, states / name)
        return _fork(lambda: recover(states / name, Deeds(states / name, fatal, error=error), states / f"{name}.txt"))

    assert hit("whole", None, 0) == 0
    names = (states / "whole.txt").read_text().splitlines()
    return [
        (name, hit(f"{at}", at, 0), hit(f"{at} failed", at, ERRORS[at % len(ERRORS)])) for at, name in enumerate(names)
    ]


def _fork(action: Callable[..., None], *args: Any) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action(*args)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def state_name(fatal: int, tear: bool) -> str:
    """Return the name of the folder that a way to die leaves."""
    return f"{fatal}{' torn' if tear else ''}"


def stop_after_one(folder: Path, base: Path, world: int) -> tuple[Path, Path, Path]:
    """Make a whole run of three updates and one that saved update 1 and went no further; returns file and both.

    Two ranks save in the background. One rank does not: it will be forked, and a thread is not.
    """
    mode = "wait" if world == 1 else "background"
    saving = {"every": 1, "keep": 1, "mode": mode}
    file = make_run(folder, base, length={"updates": 3}, checkpoint=saving, data={"prefetch": 0})
    train_whole(world, file, f"run.output_dir={folder}/whole")
    start = folder / "start"
    with pytest.raises(RankFailed, match="died"):
        run_ranks(train_watched, world, file, start, 0, 0)
    assert "update-00000001" in checkpoint_names(start)
    for leftover in (start / "checkpoints").glob(".*"):
        shutil.rmtree(leftover)
    return file, folder / "whole", start


def check_resumed(folder: Path, whole: Path, said: str, resumed: int, *, bitwise: bool = True) -> None:
    """The run went on from checkpoint ``resumed``, and it is the run that was never killed.

    Bit by bit, unless it went on with another number of processes.
    """
    assert f"resumed update-{resumed:08d}: {resumed} of 3" in said, f"{folder.name}: {said}"
    losses, expected = ([line["loss"] for line in updates_of(run)] for run in (folder, whole))
    if bitwise:
        assert_same_weights(folder, whole)
        assert losses == expected
    assert losses == pytest.approx(expected, rel=0, abs=1e-5)
    assert checkpoint_names(folder) == ["update-00000003"], "leftovers"


def ways_to_die(names: Sequence[str]) -> list[tuple[int, bool]]:
    """Every deed, and every sync of a file a second time, torn."""
    torn = [(at, True) for at, name in enumerate(names) if name.startswith("sync") and name.count("/") == 2]
    return [(at, False) for at in range(len(names))] + torn


@pytest.mark.timeout(300)
def test_b51_killed_at_every_point_of_a_save_1p(tiny: Path, tmp_path: Path) -> None:
    file, whole, start = stop_after_one(tmp_path, tiny, 1)
    unsound = start / "checkpoints/update-00000002"  # sits on the name that the save wants
    unsound.mkdir()
    (unsound / "__0_0.distcp").write_bytes(b"half")
    shutil.copytree(start, tmp_path / "enumerated")
    (names,) = run_ranks(train_watched, 1, file, tmp_path / "enumerated")
    check_names(names)
    ways = ways_to_die(names)
    assert sum(tear for _, tear in ways) == 3
    (tmp_path / "states").mkdir()
    run_ranks(fork_deaths, 1, file, start, tmp_path / "states", ways)
    folders = [tmp_path / "states" / state_name(*way) for way in ways]
    (said,) = run_ranks(resume_all, 1, file, folders, [0] * len(folders))
    published = names.index(PUBLISHED)
    for (at, _), folder, words in zip(ways, folders, said):
        check_resumed(folder, whole, words, 2 if at > published else 1)
        still_there = at <= names.index(MOVED_ASIDE)
        assert ("ignored update-00000002: it has no manifest" in words) == still_there


@pytest.mark.timeout(300)
def test_b54_an_error_at_every_point_of_a_save_leaves_what_is_complete(tiny: Path, tmp_path: Path) -> None:
    file, whole, start = stop_after_one(tmp_path, tiny, 1)
    shutil.copytree(start, tmp_path / "enumerated")
    (names,) = run_ranks(train_watched, 1, file, tmp_path / "enumerated")
    check_names(names)
    ways = [(at, False) for at in range(len(names))]
    (tmp_path / "states").mkdir()
    (codes,) = run_ranks(fork_deaths, 1, file, start, tmp_path / "states", ways, True)
    folders = [tmp_path / "states" / state_name(*way) for way in ways]
    (said,) = run_ranks(resume_all, 1, file, folders, [0] * len(folders))
    published = names.index(PUBLISHED)
    for at, (folder, words, code) in enumerate(zip(folders, said, codes)):
        check_resumed(folder, whole, words, 2 if at > published or code == 0 else 1)
        if at <= published and names[at].startswith(("open", "sync", "rename")):
            assert code == 1, f"nothing was said about {names[at]}"


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_b51_hit_at_every_point_of_a_recovery(tiny: Path, tmp_path: Path) -> None:
    """A save of update 2 that was cut short is lying there; what was logged after update 1 has to go."""
    file, whole, start = stop_after_one(tmp_path, tiny, 1)
    shutil.copytree(start / "checkpoints/update-00000001", start / "checkpoints/.update-00000002.tmp")
    with (start / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"update": 2, "loss": 1.0}\n{"upda')
    (tmp_path / "states").mkdir()
    (found,) = run_ranks(fork_recoveries, 1, file, start, tmp_path / "states")
    deeds = [name for name, _, _ in found]
    for expected in ("rmdir checkpoints/.update-00000002.tmp", "rename metrics.jsonl", "rename run.yaml"):
        assert expected in deeds, deeds
    assert all(killed == -9 for _, killed, _ in found)
    folders = [tmp_path / "states" / f"{at}{how}" for at in range(len(found)) for how in ("", " failed")]
    (said,) = run_ranks(resume_all, 1, file, folders, [0] * len(folders))
    for folder, words in zip(folders, said):
        went_on = "resumed update-00000003: 3 of 3" in words  # the error was none to the run
        check_resumed(folder, whole, words, 3 if went_on else 1)
        assert "failed" in folder.name or not went_on


@pytest.mark.timeout(300)
def test_b51_killed_at_every_point_of_a_save_2p(tiny: Path, tmp_path: Path) -> None:
    file, whole, start = stop_after_one(tmp_path, tiny, 2)
    shutil.copytree(start, tmp_path / "enumerated")
    names_by_rank = run_ranks(train_watched, 2, file, tmp_path / "enumerated")
    check_names(names_by_rank[0])
    assert any(name.startswith("sync") for name in names_by_rank[1]), "rank 1 writes a share of the tensors"
    ways = [
        (victim, at)
        for victim, names in enumerate(names_by_rank)
        for at, name in enumerate(names)
        if name.startswith(("open", "sync", "rename"))
    ]
    folders = [tmp_path / f"rank{victim} {names_by_rank[victim][at].replace('/', ' ')} {at}" for victim, at in ways]
    for folder, (victim, at) in zip(folders, ways):
        shutil.copytree(start, folder)
        with pytest.raises(RankFailed, match="died"):
            run_ranks(train_watched, 2, file, folder, victim, at)
    seen = [tuple(name for name in checkpoint_names(folder) if name[0] != ".") for folder in folders]
    firsts = [seen.index(names) for names in sorted(set(seen))]
    assert len(firsts) == 2, "before publishing and after it"
    others = [k for k in range(len(folders)) if k not in firsts]
    said = dict(
        zip(firsts, run_ranks(resume_all, 2, file, [folders[k] for k in firsts], [free_port() for _ in firsts])[0])
    )
    said |= dict(zip(others, run_ranks(resume_all, 1, file, [folders[k] for k in others], [0] * len(others))[0]))
    published = names_by_rank[0].index(PUBLISHED)
    for k, ((victim, at), folder) in enumerate(zip(ways, folders)):
        resumed = 2 if victim == 0 and at > published else 1
        check_resumed(folder, whole, said[k], resumed, bitwise=k in firsts)


def check_names(names: Sequence[str]) -> None:
    """The enumeration must see what a save surely does, or the test would kill nowhere."""
    private = "checkpoints/.update-00000002.tmp"
    for expected in (
        f"mkdir {private}",
        f"open {private}/__0_0.distcp",
        f"sync {private}/__0_0.distcp",
        f"open {private}/manifest.json",
        f"sync {private}/manifest.json",
        f"sync {private}",
        PUBLISHED,
        "sync checkpoints",
        "rename checkpoints/.update-00000001.old",
        "rmdir checkpoints/.update-00000001.old",
    ):
        assert any(name.startswith(expected) for name in names), (expected, names)
