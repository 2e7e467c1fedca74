"""Each finding of the doctor, given a machine that is fit and one that is not."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from rich.console import Console

from unisono.doctor import devices, host, run, software, speed
from unisono.doctor.exchange import exchange
from unisono.doctor.finding import Finding

GIB = 1 << 30
Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("found", "status"),
    [("2.7.1+cu128", "fail"), ("2.8.0", "ok"), ("2.10.0a0+git1", "ok"), ("3", "ok"), ("1.13", "fail"), (None, "fail")],
)
def test_torch_must_be_new_enough(found: str | None, status: str) -> None:
    finding = software.torch(found, "2.8")
    assert finding.status == status
    if status == "fail":
        assert found is None or found in finding.detail
        assert "2.8" in finding.detail
        assert "pip install" in (finding.hint or "")


def test_torch_that_cannot_be_loaded_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    finding = software.torch("2.13.0", "2.8")
    assert finding.status == "fail"
    assert "cannot be loaded" in finding.detail


def test_needed_versions_come_from_the_package_itself() -> None:
    needed = software.needed()
    assert needed["torch"] == "2.8"
    assert "transformers" in needed
    assert "pytest" not in needed


def test_libraries() -> None:
    assert software.libraries({"peft": "0.18"}, {"peft": "0.18.0"}).status == "ok"
    finding = software.libraries({"peft": "0.18", "numpy": "1.26"}, {"peft": "0.9.1", "numpy": None})
    assert finding.status == "fail"
    assert finding.detail == "peft 0.9.1 (0.18 needed), numpy is missing (1.26 needed)"


@pytest.mark.parametrize("value", ["0, 1", " 1", "", "-1", "GPU-8932f937", "MIG-x", "0,0", None])
def test_b69_visible_devices_in_any_form(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    finding = devices.visibility()
    assert finding.status in ("ok", "warn")
    assert ("is not set" if value is None else repr(value)) in finding.detail
    assert "torch sees" in finding.detail
    assert devices.gpus()


@pytest.mark.parametrize(
    ("value", "seen", "status"),
    [
        ("GPU-8932f937", 0, "warn"),
        ("7", 0, "warn"),
        ("", 0, "ok"),
        ("-1", 0, "ok"),
        ("0, 1", 2, "ok"),
        ("0,0", 1, "ok"),
    ],
)
def test_b69_torch_is_asked_and_empty_means_the_cpu(
    monkeypatch: pytest.MonkeyPatch, value: str, seen: int, status: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    finding = devices.visibility()
    assert (finding.status, f"torch sees {seen} GPU" in finding.detail) == (status, True)


def test_gpus_that_torch_cannot_see_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_available() -> bool:
        import warnings

        warnings.warn("The NVIDIA driver on your system is too old (found version 11040).\nmore", stacklevel=1)
        return False

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    (finding,) = devices.gpus()
    assert finding.status == "warn"
    assert "built for 12.8" in finding.detail
    assert "driver on your system is too old" in finding.detail
    assert "more" not in finding.detail


Properties = namedtuple("Properties", "name major minor")


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, major: int, free: int) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties("Card", major, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90"])


@pytest.mark.parametrize(("major", "free", "status"), [(9, 79, "ok"), (8, 20, "warn"), (6, 79, "fail")])
def test_gpu_with_memory_capability_and_driver(
    monkeypatch: pytest.MonkeyPatch, major: int, free: int, status: str
) -> None:
    pretend_gpu(monkeypatch, major, free * GIB)
    (finding,) = devices.gpus()
    assert finding.status == status
    assert f"Card, 80.0 GiB ({free}.0 free), compute capability {major}.0, driver " in finding.detail


def test_gpu_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(index: int) -> None:
        raise RuntimeError("CUDA error: all devices are busy\nmore")

    pretend_gpu(monkeypatch, 9, GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", busy)
    assert devices.gpus() == [
        Finding(
            "gpu 0", "fail", "CUDA error: all devices are busy", "is another process using it alone, or is it broken?"
        )
    ]


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (["sm_80", "sm_90"], (8, 6), True),
        (["sm_80", "sm_90"], (10, 0), False),
        (["sm_90", "compute_90"], (10, 0), True),
        (["sm_86"], (8, 0), False),
        (["sm_90a", "sm_100"], (9, 0), True),
        (["sm_70"], (6, 1), False),
        (["gfx90a"], (9, 0), False),
    ],
)
def test_which_builds_run_on_which_gpu(architectures: list[str], capability: tuple[int, int], runs: bool) -> None:
    assert devices.runs_on(architectures, *capability) is runs


def test_driver_version(tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20  Sun Mar 2\nGCC version: 12.2.0\n")
    assert devices.driver_version(file) == "570.133.20"
    file.write_text("nothing")
    assert devices.driver_version(file) == "unknown"
    assert devices.driver_version(tmp_path / "none") == "unknown"


def test_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.backends().status == "ok"
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    assert "gloo: not there" in devices.backends().detail
    if not torch.cuda.is_available():
        assert devices.backends().status == "fail"


def test_exchange_really_runs() -> None:
    finding = exchange("gloo")
    assert finding.status == "ok", finding
    assert finding.detail.startswith("2 ranks, sum right, 16 MiB in ")


def test_exchange_that_hangs_is_ended_in_time(tmp_path: Path) -> None:
    program = f"import os, sys, time; open(r'{tmp_path}/' + sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    start = time.monotonic()
    finding = exchange("gloo", limit=1.0, command=[sys.executable, "-S", "-c", program])
    assert time.monotonic() - start < 20
    assert (finding.status, finding.detail) == ("fail", "2 ranks did not finish within 1 s")
    for file in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), signal.SIG_DFL)


def test_exchange_names_the_rank_that_failed_and_why() -> None:
    program = "import sys, time; sys.argv[1] == '1' and sys.exit('no such interface'); time.sleep(60)"
    finding = exchange("gloo", command=[sys.executable, "-S", "-c", program])
    assert finding.detail == "rank 1 failed: no such interface"
    assert "GLOO_SOCKET_IFNAME" in (finding.hint or "")


def test_number_formats_are_measured() -> None:
    finding = speed.formats()
    assert "GFLOP/s" in finding.detail
    assert "bf16 " in finding.detail
    assert " x the speed of fp32" in finding.detail


def full_device(dtype: torch.dtype, device: torch.device) -> float:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_number_formats_that_are_missing_are_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(dtype: torch.dtype, device: torch.device) -> float:
        if dtype == torch.float16:
            raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'")
        return {torch.float32: 1.0, torch.bfloat16: 4.0}[dtype]

    monkeypatch.setattr(speed, "product_seconds", seconds)
    finding = speed.formats()
    assert "bf16 0.25 x the speed of fp32" in finding.detail
    assert "fp16 not supported" in finding.detail
    monkeypatch.setattr(speed, "product_seconds", full_device)
    assert speed.formats().status == "fail"
    assert "fp32 not supported (CUDA out of memory)" in speed.formats().detail
    assert speed.verdict("cpu", "", 0.25).hint is not None
    assert speed.verdict("cuda", "", 0.25).status == "warn"
    assert speed.verdict("cuda", "", 8.0) == Finding("number formats", "ok", "")


@pytest.mark.parametrize(("free", "status"), [(0.5, "fail"), (10, "warn"), (100, "ok")])
def test_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: float, status: str) -> None:
    monkeypatch.setattr(host.shutil, "disk_usage", lambda path: Usage(0, 0, int(free * GIB)))
    assert host.disk("disk", tmp_path / "not" / "yet").status == status
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "cannot be written" in host.disk("disk", tmp_path).detail


@pytest.mark.parametrize(("free", "status"), [(1 << 26, "warn"), (8 * GIB, "ok")])
def test_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, status: str) -> None:
    assert host.shared_memory(tmp_path / "none").status == "ok"
    monkeypatch.setattr(host.shutil, "disk_usage", lambda path: Usage(free, 0, free))
    assert host.shared_memory(tmp_path).status == status


def test_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.ports().status == "ok"

    def refuse(address: object) -> None:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(socket, "create_server", refuse)
    assert host.ports().detail == "no free port on 127.0.0.1: Address already in use"


@pytest.mark.parametrize(
    ("asked", "status"), [(None, "ok"), ("1", "ok"), ("4", "ok"), ("64", "warn"), ("0", "warn"), ("4,2", "warn")]
)
def test_threads(asked: str | None, status: str) -> None:
    finding = host.threads(4, {} if asked is None else {"OMP_NUM_THREADS": asked})
    assert finding.status == status
    assert finding.detail.startswith("4 of ")


@pytest.mark.parametrize(
    ("found", "status", "text"),
    [
        (["127.0.1.1"], "ok", "good for one machine only"),
        (["::1", "127.0.0.1"], "ok", "good for one machine only"),
        (["10.0.0.5"], "ok", "box leads to 10.0.0.5"),
        (["192.168.9.9"], "warn", "no interface of this machine has"),
        (None, "warn", "no address"),
    ],
)
def test_host_name(found: list[str] | None, status: str, text: str) -> None:
    interfaces = {"lo": ["127.0.0.1", "::1", "00:00:00:00:00:00"], "eth7": ["10.0.0.5", "fe80::1"]}
    finding = host.judge_name("box", found, interfaces)
    assert finding.status == status
    assert text in finding.detail
    if found != ["10.0.0.5"]:
        assert "GLOO_SOCKET_IFNAME=eth7" in (finding.hint or "")
    assert host.host_name().name == "host name"


def some(*statuses: str) -> list[Finding]:
    return [Finding(f"thing {at}", status, "is [so]", "do [this]") for at, status in enumerate(statuses)]  # type: ignore[arg-type]


@pytest.mark.parametrize(("statuses", "code"), [(("ok", "warn"), 0), (("ok", "fail", "warn"), 1)])
def test_report_as_json_and_as_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], statuses: tuple[str, ...], code: int
) -> None:
    monkeypatch.setattr(run, "_steps", lambda cores: iter([("things", lambda: some(*statuses))]))
    assert run.run(usable_cores=2, as_json=True) == code
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert report["ok"] is (code == 0)
    assert [finding["status"] for finding in report["findings"]] == list(statuses)
    assert "looking at things" in output.err
    assert run.run(usable_cores=2, as_json=False) == code
    table = capsys.readouterr().out
    assert "is [so]" in table
    assert "hint: do [this]" in table


def test_without_torch_the_rest_is_still_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "installed", lambda package: None if package == "torch" else "99")
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        findings = list(run._examine(2, Console(file=nowhere)))
    names = [finding.name for finding in findings]
    assert [finding.name for finding in findings if finding.status == "fail"] == ["torch"]
    assert "host name" in names
    assert "number formats" not in names
