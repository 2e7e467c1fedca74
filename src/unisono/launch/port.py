"""The port on which the ranks meet."""

from __future__ import annotations

import errno
import socket

from unisono.errors import LaunchError


def check_port(port: int) -> None:
    """Raise LaunchError if ``port`` cannot be listened on now; 0 stands for any free one and is always fine."""
    if port == 0:
        return
    try:
        _listen(port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(
                f"port {port} is taken by another process",
                where="launch.port",
                hint="launch.port=0 takes a free one; or end the process that holds it",
            ) from None
        raise LaunchError(f"port {port} cannot be used: {error.strerror}", where="launch.port") from None


def _listen(port: int) -> None:
    """Listen for a moment on every address, as the ranks' store will do."""
    both = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if both else socket.AF_INET) as probe:
        # a port in TIME_WAIT after the last run is free: the store uses this option too
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if both:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        probe.bind(("", port))
        probe.listen(1)
