"""What the launcher finds out about the machine: cores, ranks, port, allocator."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support.launching import fake_config
from unisono import allocator
from unisono.cores import usable_cores
from unisono.errors import LaunchError
from unisono.launch.port import check_port
from unisono.launch.ranks import Machine, decide_ranks, look_at_machine


def container(tmp_path: Path, files: dict[str, str], membership: str) -> dict[str, Path]:
    """Write cgroup files and the file that says which groups a process is in."""
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "membership").write_text(membership)
    return {"membership": tmp_path / "membership", "root": tmp_path / "cgroup"}


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the affinity mask has eight cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(sys, "platform", "linux")


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("files", "membership", "cores"),
    [
        ({"cpu.max": "max 100000\n"}, "0::/\n", 8),
        ({"cpu.max": "300000 100000\n"}, "0::/\n", 3),
        ({"cpu.max": "50000 100000\n"}, "0::/\n", 1),
        ({"cpu.max": "1600000 100000\n"}, "0::/\n", 8),
        # the strictest group on the way up counts; the path may be the host's while the root is the container's
        ({"cpu.max": "max 100000", "a/cpu.max": "200000 100000", "a/b/cpu.max": "400000 100000"}, "0::/a/b\n", 2),
        ({"cpu.max": "200000 100000"}, "0::/docker/0123\n", 2),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "1:cpu:/\n", 8),
        (
            {"cpu,cpuacct/x/cpu.cfs_quota_us": "250000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"},
            "4:cpu,cpuacct:/x",
            2,
        ),
        ({"cpuset/cpu.cfs_quota_us": "100000", "cpuset/cpu.cfs_period_us": "100000"}, "1:cpuset:/\n", 8),
    ],
)
def test_b68_a_container_limit_is_respected(tmp_path: Path, files: dict[str, str], membership: str, cores: int) -> None:
    assert usable_cores(**container(tmp_path, files, membership)) == cores


@pytest.mark.skipif(sys.platform != "linux", reason="affinity masks are a matter of Linux")
def test_b68_an_affinity_mask_of_one_core_is_respected() -> None:
    code = (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]);"
        "from unisono.cores import usable_cores; print(usable_cores())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "1\n"


@pytest.mark.parametrize(
    ("asked", "strategy", "gpus", "cores", "ranks"),
    [
        ("auto", "auto", 4, 64, 4),
        ("auto", "auto", 0, 8, 4),
        ("auto", "auto", 0, 2, 1),
        ("auto", "auto", 0, 1, 1),
        ("auto", "single", 4, 64, 1),
        (3, "auto", 0, 1, 3),
        (2, "auto", 4, 64, 2),
    ],
)
def test_ranks(asked: int | str, strategy: str, gpus: int, cores: int, ranks: int) -> None:
    config = fake_config(ranks=asked)
    config = config.model_copy(update={"strategy": config.strategy.model_copy(update={"name": strategy})})
    assert decide_ranks(config, Machine(gpus, cores)) == ranks


@pytest.mark.parametrize("visible", ["", "-1"])
def test_a_machine_whose_gpus_are_hidden_is_a_cpu(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    machine = look_at_machine()
    assert machine.gpus == 0
    assert machine.notes == (
        f"torch is built for GPUs but sees none (CUDA_VISIBLE_DEVICES is {visible!r}): this run uses the CPU",
    )


@pytest.mark.parametrize("address", ["", "127.0.0.1"])
@pytest.mark.parametrize("listening", [True, False])
def test_b45_a_taken_port_is_named(address: str, listening: bool) -> None:
    with socket.socket() as holder:
        holder.bind((address, 0))
        if listening:
            holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(LaunchError, match=f"launch.port: port {port} is taken"):
            check_port(port)
    check_port(port)


def test_b66_a_port_is_free_again_as_soon_as_its_connections_are_closed() -> None:
    """The side that closes first keeps the port in TIME_WAIT for a minute."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            connection, _ = listener.accept()
            connection.close()
            assert client.recv(1) == b""
    check_port(port)


def test_a_broken_allocator_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "libmimalloc.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(allocator, "_candidates", lambda: iter([tmp_path / "gone.so", broken]))
    assert allocator.find_allocator() is None


def test_an_allocator_of_a_wheel_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel lists its library under three names, of which one is enough, beside files that are none."""
    from importlib.metadata import PackagePath

    def listed(name: str) -> list[PackagePath]:
        found = [PackagePath("lib/libmimalloc.so.3"), PackagePath("lib/libmimalloc-debug.so"), PackagePath("x.py")]
        for file in found:
            file.dist = type("Where", (), {"locate_file": lambda self, path: tmp_path / path})()
        return found

    monkeypatch.setattr(allocator, "files", listed)
    monkeypatch.setattr(allocator, "_works", lambda library: True)
    assert allocator.find_allocator() == tmp_path / "lib/libmimalloc.so.3"
