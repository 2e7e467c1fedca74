"""The environment of the ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.launching import fake_config
from unisono.launch.environment import RankEnvironment, applied, rank_environment
from unisono.launch.ranks import Machine

LIBRARY = Path("/opt/lib/libmimalloc.so.3")


def build(
    *,
    ranks: int = 2,
    gpus: int = 0,
    cores: int = 2,
    platform: str = "linux",
    inherited: dict[str, str] | None = None,
    found: Path | None = LIBRARY,
    allocator: str = "auto",
    **launch: object,
) -> RankEnvironment:
    """Build the environment of a launch."""
    section = fake_config(ranks=ranks, **{"allocator": allocator, **launch}).launch
    machine = Machine(gpus, cores)
    return rank_environment(section, ranks, machine, inherited=inherited or {}, platform=platform, allocator=found)


@pytest.mark.parametrize(
    ("ranks", "cores", "inherited", "launch", "threads", "source"),
    [
        (2, 2, {}, {}, "1", "usable cores: 2"),
        (1, 2, {}, {}, "2", "usable cores: 2"),
        (4, 2, {}, {}, "1", "usable cores: 2"),
        (1, 1, {}, {}, "1", "usable cores: 1"),
        (2, 64, {"OMP_NUM_THREADS": "3"}, {}, "3", "OMP_NUM_THREADS of your environment"),
        (2, 64, {"OMP_NUM_THREADS": "3"}, {"env": {"OMP_NUM_THREADS": "5"}}, "5", "OMP_NUM_THREADS of launch.env"),
        (2, 64, {"OMP_NUM_THREADS": "3"}, {"threads": 7}, "7", "launch.threads"),
    ],
)
def test_b68_threads(
    ranks: int, cores: int, inherited: dict[str, str], launch: dict[str, object], threads: str, source: str
) -> None:
    environment = build(ranks=ranks, cores=cores, inherited=inherited, **launch)
    assert environment.variables["OMP_NUM_THREADS"] == threads
    assert f"threads per rank: {threads} ({source})" in environment.notes[0]


def test_b73_windows_has_no_libuv() -> None:
    variables = build(platform="win32").variables
    assert variables["USE_LIBUV"] == "0"
    assert "GLOO_SOCKET_IFNAME" not in variables and "LD_PRELOAD" not in variables
    assert "USE_LIBUV" not in build().variables


def test_ranks_of_one_machine_meet_on_the_loopback() -> None:
    assert build().variables["GLOO_SOCKET_IFNAME"] == "lo"
    assert build(platform="darwin").variables["GLOO_SOCKET_IFNAME"] == "lo0"
    assert build(inherited={"GLOO_SOCKET_IFNAME": "eth0"}).variables["GLOO_SOCKET_IFNAME"] == "eth0"
    assert build(env={"GLOO_SOCKET_IFNAME": "eth1"}).variables["GLOO_SOCKET_IFNAME"] == "eth1"


def test_ranks_host_their_own_store() -> None:
    assert build().variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_the_run_file_wins_over_the_environment_and_that_over_our_choice() -> None:
    inherited = {"TOKENIZERS_PARALLELISM": "true", "NCCL_DEBUG": "INFO", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    variables = build(gpus=2, inherited=inherited, env={"NCCL_DEBUG": "WARN"}).variables
    assert variables["TOKENIZERS_PARALLELISM"] == "true"
    assert variables["NCCL_DEBUG"] == "WARN"
    assert variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert variables["PYTHONUNBUFFERED"] == "1"
    assert build(gpus=2).variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in build().variables


def test_an_allocator_is_preloaded_and_said() -> None:
    environment = build()
    assert environment.variables["LD_PRELOAD"] == str(LIBRARY)
    assert (
        environment.notes[-1] == f"memory allocator of the ranks: {LIBRARY} (launch.allocator=none keeps the system's)"
    )
    behind = build(inherited={"LD_PRELOAD": "/usr/lib/libasan.so"})
    assert behind.variables["LD_PRELOAD"] == f"/usr/lib/libasan.so:{LIBRARY}"


@pytest.mark.parametrize(
    "how",
    [
        {"allocator": "none"},
        {"found": None},
        {"gpus": 2},
        {"inherited": {"LD_PRELOAD": "/usr/lib/libtcmalloc_minimal.so.4"}},
        {"env": {"LD_PRELOAD": ""}},
    ],
)
def test_no_allocator_is_preloaded(how: dict[str, object]) -> None:
    environment = build(**how)  # type: ignore[arg-type]
    assert environment.variables.get("LD_PRELOAD", "") == ""
    assert len(environment.notes) == 1


def test_variables_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_TEST_OLD", "old")
    monkeypatch.delenv("UNISONO_TEST_NEW", raising=False)
    with applied({"UNISONO_TEST_OLD": "1", "UNISONO_TEST_NEW": "2"}):
        assert os.environ["UNISONO_TEST_OLD"] + os.environ["UNISONO_TEST_NEW"] == "12"
    assert os.environ["UNISONO_TEST_OLD"] == "old" and "UNISONO_TEST_NEW" not in os.environ
