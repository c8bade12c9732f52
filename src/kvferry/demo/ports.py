"""Ports on loopback."""

import contextlib
import socket


def free_port() -> int:
    """One that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def free_ports(count: int, *, highest: int = 65535) -> list[int]:
    """So many different ones, up to ``highest``."""
    with contextlib.ExitStack() as held:
        found: list[int] = []
        while len(found) < count:
            probe = held.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
            if port <= highest:
                found.append(port)
        return found


def listens(port: int) -> bool:
    """Whether someone accepts connections there now."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=0.5):
            return True
    except OSError:
        return False
