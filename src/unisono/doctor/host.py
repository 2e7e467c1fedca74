"""The machine around the GPUs: memory, disk, shared memory, ports, threads, its own name."""

from __future__ import annotations

import errno
import ipaddress
import os
import shutil
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from unisono.config.paths import expand
from unisono.config.schema import DataSection
from unisono.doctor.finding import Finding, Status

_GIB = 1 << 30
_PORTS = 8
_NAME_SECONDS = 5.0


def memory() -> Finding:
    """Show the main memory."""
    facts = psutil.virtual_memory()
    detail = f"{facts.total / _GIB:.1f} GiB, {facts.available / _GIB:.1f} free"
    if facts.available < 2 * _GIB:
        return Finding("memory", "warn", detail, "a model is read through main memory: end other programs")
    return Finding("memory", "ok", detail)


def disk(name: str, folder: Path) -> Finding:
    """Judge the room where ``folder`` is, or will be; under 1 GiB nothing can be saved."""
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    detail = f"{free / _GIB:.1f} GiB free in {folder}"
    if not os.access(there, os.W_OK):
        return Finding(name, "warn", f"{folder} cannot be written", "choose another folder, or ask for the right to")
    status: Status = "fail" if free < _GIB else "warn" if free < 20 * _GIB else "ok"
    hint = None if status == "ok" else "a checkpoint takes about 12 bytes for each weight that is trained"
    return Finding(name, status, detail, hint)


def cache_folder() -> Path:
    """Give the folder for prepared data that a run file has by default."""
    return Path(expand(str(DataSection.model_fields["cache_dir"].default)))


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Judge /dev/shm, through which NCCL and loader processes pass data; containers often have 64 MiB."""
    if not folder.is_dir():
        return Finding("shared memory", "ok", f"no {folder} on this system")
    size = shutil.disk_usage(folder)
    detail = f"{size.total / _GIB:.2f} GiB in {folder}, {size.free / _GIB:.2f} free"
    if size.free < _GIB:
        return Finding("shared memory", "warn", detail, "in a container: docker run --shm-size=8g, or --ipc=host")
    return Finding("shared memory", "ok", detail)


def ports() -> Finding:
    """Take a few free ports on the loopback and talk to oneself over one of them."""
    listeners: list[socket.socket] = []
    try:
        for _ in range(_PORTS):
            listeners.append(socket.create_server(("127.0.0.1", 0)))
        with socket.create_connection(listeners[0].getsockname(), timeout=5):
            pass
    except OSError as error:
        hint = "is the loopback up? are all ports taken (ss -s)?"
        return Finding("ports", "fail", f"no free port on 127.0.0.1: {error.strerror or errno.errorcode}", hint)
    finally:
        for listener in listeners:
            listener.close()
    return Finding("ports", "ok", f"{_PORTS} free ones taken on 127.0.0.1, and reached")


def threads(usable: int, environment: Mapping[str, str]) -> Finding:
    """Compare the ``usable`` cores (affinity and container limit counted) with what threads are asked for."""
    asked = environment.get("OMP_NUM_THREADS")
    set_to = "is not set" if asked is None else f"is {asked!r}"
    detail = f"{usable} of {os.cpu_count()} cores usable; OMP_NUM_THREADS {set_to}"
    if asked is not None and not (asked.isdecimal() and 0 < int(asked) <= usable):
        return Finding("threads", "warn", detail, f"unset OMP_NUM_THREADS, or set it to 1..{usable}: ranks keep it")
    return Finding("threads", "ok", detail)


def host_name() -> Finding:
    """Judge where this machine's own name leads: gloo and NCCL listen there unless told otherwise."""
    name = socket.gethostname()
    interfaces = {
        interface: [address.address.partition("%")[0] for address in addresses]
        for interface, addresses in psutil.net_if_addrs().items()
    }
    return judge_name(name, _addresses(name), interfaces)


def judge_name(name: str, found: Sequence[str] | None, interfaces: Mapping[str, Sequence[str]]) -> Finding:
    """Judge the addresses ``found`` for ``name`` (None: no answer) given the addresses of each interface."""
    outward = [interface for interface, own in interfaces.items() if any(_is_outward(address) for address in own)]
    choice = outward[0] if outward else "lo"
    hint = f"for several machines: GLOO_SOCKET_IFNAME={choice} and NCCL_SOCKET_IFNAME={choice}"
    if not found:
        return Finding("host name", "warn", f"{name} leads to no address", f"put it into /etc/hosts; {hint}")
    shown = f"{name} leads to {', '.join(found)}"
    if all(ipaddress.ip_address(address).is_loopback for address in found):
        return Finding("host name", "ok", f"{shown}: good for one machine only", hint)
    own = {address for addresses in interfaces.values() for address in addresses}
    if not own & set(found):
        wrong = f"put the right address into /etc/hosts, or set GLOO_SOCKET_IFNAME={choice}"
        return Finding("host name", "warn", f"{shown}, which no interface of this machine has", wrong)
    return Finding("host name", "ok", shown)


def _is_outward(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:  # a hardware address
        return False
    return not (address.is_loopback or address.is_link_local)


def _addresses(name: str) -> list[str] | None:
    """Look ``name`` up; None after some seconds, since a name server that is silent holds up for long."""
    found: list[str] = []

    def look() -> None:
        try:
            entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except OSError:
            return
        found.extend(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in entries))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(_NAME_SECONDS)
    return found or None
