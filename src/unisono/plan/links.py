"""Links and what a collective costs on them: latency a step, and bytes over bandwidth (Hockney's alpha and beta).

Steps and bytes of rings are those of Thakur, Rabenseifner and Gropp 2005 ("Optimization of collective communication
operations in MPICH", section 4); latencies, protocols and trees those of NCCL's own tuner (nccl/src/graph/tuning.cc,
ncclTunerConstantsDefaults; torch/_inductor/comm_analysis.py repeats them), simplified: as there, the quickest algorithm
and protocol is taken. No contention with others' jobs, no in-network sums (SHARP), every machine alike. Nothing of this
was measured by us.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass

from unisono.errors import ConfigError, LaunchError
from unisono.plan.hardware import Device

MICRO = 1e-6


@dataclass(frozen=True)
class Network:
    """Links between machines. ``gb_per_second`` one way: of each GPU's own adapter, or of the machine's only one.

    ``latency_seconds`` comes on top of NCCL's own for a step over a network.
    """

    name: str
    gb_per_second: float
    is_per_gpu: bool
    latency_seconds: float
    source: str


_REACHED = 0.9  # of the line rate, by large messages
_TCP_SECONDS = 20 * MICRO  # an assumption: a message through the kernel's TCP, one way
_NETWORKS = [
    Network("ib-ndr", 50 * _REACHED, True, 0.0, "NDR 400 Gb/s, an adapter for each GPU: NVIDIA DGX H100 data sheet"),
    Network("ib-hdr", 25 * _REACHED, True, 0.0, "HDR 200 Gb/s, an adapter for each GPU: NVIDIA DGX A100 data sheet"),
    Network("efa-400", 50 * _REACHED, False, 10 * MICRO, "400 Gb/s a machine: AWS EC2 P4d; latency assumed"),
    Network("ethernet-100", 12.5 * _REACHED, False, _TCP_SECONDS, "100 Gb/s a machine, TCP"),
    Network("ethernet-25", 3.125 * _REACHED, False, _TCP_SECONDS, "25 Gb/s a machine, TCP"),
    Network("ethernet-10", 1.25 * _REACHED, False, _TCP_SECONDS, "10 Gb/s a machine, TCP"),
]
NETWORKS = {network.name: network for network in _NETWORKS}
DEFAULT_NETWORK = "ib-ndr"

# NCCL's latencies in seconds for LL, LL128 and Simple: of a start, and of a step inside a machine and between machines.
# Ring, then tree. LL sends a flag with each four bytes, LL128 one with each 120; on PCIe NCCL leaves LL128 out.
_START = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 8.4)}
_NVLINK = {"ring": (0.6, 1.9, 3.4), "tree": (0.6, 1.25, 4.0)}
_PCIE = {"ring": (1.0, 2.5, 5.7), "tree": (1.0, 1.9, 4.0)}
_NET = {"ring": (2.7, 4.0, 14.0), "tree": (5.0, 8.5, 14.0)}
_SHARES = (0.5, 0.92, 1.0)  # of the bandwidth
_TREE_SHARE = 0.92
_SLOWEST_NVLINK_GB = 64.0  # what is slower is PCIe
GLOO_STEP_SECONDS = 30 * MICRO  # an assumption: a message of gloo's over TCP; losses and words travel so, from the CPU


@dataclass(frozen=True)
class Team:
    """The ranks of one collective: on how many machines, and how many such teams share a machine's network."""

    ranks: int
    machines: int
    num_sharing: int


@dataclass(frozen=True)
class Cluster:
    """``machines`` alike, each with ``gpus`` of a device."""

    device: Device
    gpus: int
    machines: int
    network: Network

    @property
    def ranks(self) -> int:
        """One for each GPU."""
        return self.gpus * self.machines

    def team(self, among: str, parts: int) -> Team:
        """Find all ranks, or those of one copy of the model (neighbours), or those with the same part of it.

        Raises ConfigError where a copy would begin in the middle of a machine.
        """
        if among == "all" or parts >= self.ranks:
            return Team(1 if among == "copies" else self.ranks, self.machines, 1)
        if self.gpus % parts and parts % self.gpus:
            raise ConfigError(
                f"copies of the model over {parts} ranks each do not divide machines of {self.gpus} GPUs",
                where="strategy.shard_ranks",
                hint=f"use {self.gpus}, a part of it or a multiple",
            )
        if among == "parts":
            return Team(parts, max(1, parts // self.gpus), 1)
        return Team(self.ranks // parts, self.machines // max(1, parts // self.gpus), min(parts, self.gpus))

    def bytes_per_second(self, team: Team) -> float:
        """Return a ring's bandwidth: its slowest link. The rings of a team enter and leave by all of its adapters."""
        inside = self.device.link_gb_per_second * 1e9
        if team.machines == 1:
            return inside
        adapters = self.gpus if self.network.is_per_gpu else 1
        between = self.network.gb_per_second * 1e9 * adapters / team.num_sharing
        return between if team.ranks == team.machines else min(inside, between)

    def seconds(self, kind: str, num_bytes: int, team: Team) -> float:
        """Return what a collective takes: by the quickest of NCCL's algorithms and protocols."""
        if team.ranks == 1:
            return 0.0
        return min(
            start + latency + sent / (self.bytes_per_second(team) * share)
            for start, latency, sent, share in self._ways(kind, num_bytes, team)
        )

    def _ways(self, kind: str, num_bytes: int, team: Team) -> Iterator[tuple[float, float, float, float]]:
        is_pcie = self.device.link_gb_per_second < _SLOWEST_NVLINK_GB
        for algorithm in ("ring", "tree") if kind == "all_reduce" else ("ring",):
            inside, between = _steps(kind, algorithm, team)
            for protocol, share in enumerate(_SHARES):
                if is_pcie and protocol == 1:
                    continue
                step = (_PCIE if is_pcie else _NVLINK)[algorithm][protocol] * MICRO
                hop = _NET[algorithm][protocol] * MICRO + self.network.latency_seconds
                efficiency = share * (_TREE_SHARE if algorithm == "tree" else 1.0)
                start = _START[algorithm][protocol] * MICRO
                yield start, inside * step + between * hop, _sent(kind, num_bytes, team.ranks), efficiency


def _steps(kind: str, algorithm: str, team: Team) -> tuple[float, float]:
    """Return the steps inside machines and between them, as NCCL's tuner counts them."""
    if algorithm == "tree":
        return 2 * (team.ranks / team.machines - 1), 2 * math.log2(team.machines)
    is_reduce = kind == "all_reduce"
    steps = (team.ranks - 1) * (2 if is_reduce else 1)
    between = 0 if team.machines == 1 else 2 * team.machines if is_reduce else team.machines - 1
    return max(0, steps - between), between


def _sent(kind: str, num_bytes: int, ranks: int) -> float:
    """Return the bytes that a rank sends in a ring: of n bytes over p ranks (p - 1) / p n to gather or to scatter.

    An all-reduce is both; a broadcast hands on all of them.
    """
    if kind == "broadcast":
        return num_bytes
    return num_bytes * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)


def words_seconds(ranks: int) -> float:
    """Return what the gather of losses takes: gloo's ring of small messages, a step for each other rank."""
    return (ranks - 1) * GLOO_STEP_SECONDS


def find_network(name: str) -> Network:
    """Return the network called ``name``. Raises LaunchError with the nearest name for an unknown one."""
    if name in NETWORKS:
        return NETWORKS[name]
    near = difflib.get_close_matches(name, NETWORKS, n=1)
    raise LaunchError(
        f"--network {name}: its figures are not known; those of {', '.join(NETWORKS)} are",
        hint=f"did you mean {near[0]}?" if near else None,
    )
