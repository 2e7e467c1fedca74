"""Nothing listens beyond loopback: neither the store where ranks meet nor gloo."""

from __future__ import annotations

import psutil

from support.ranks import run_ranks


def _listeners(rank: int, world: int) -> list[str]:
    from unisono import dist

    dist.join(dist.find_world(), 30)
    dist.gather([float(rank)])
    found = [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    dist.leave()
    return found


def test_ranks_of_one_host_listen_on_loopback_only() -> None:
    addresses = [ip for found in run_ranks(_listeners, 2, env={"GLOO_SOCKET_IFNAME": "lo"}) for ip in found]
    assert addresses
    assert set(addresses) == {"127.0.0.1"}
