"""File descriptors: as many as the process may have, and no more clients than they suffice for."""

import contextlib
import errno
import logging
import os
import resource
import socket
import time

PER_CLIENT = 3  # its connection, one to a worker, and one there that is idle since a moment
SPARE = 256  # listeners, feeds, probes, metrics
OWN = 32  # at least: what the process itself has open
FEW_CLIENTS = 1024  # so few are worth a warning
TOLD_EVERY_S = 60.0
_LACKING = (errno.EMFILE, errno.ENFILE)

log = logging.getLogger("kvferry.router")


def clients_within_descriptors(wanted: int) -> int:
    """How many clients can be served at a time. Raises the soft limit of open files to the hard one first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft == resource.RLIM_INFINITY:
        return wanted
    spare = max(OWN, min(SPARE, soft // 2))
    return min(wanted, max(1, (soft - spare) // PER_CLIENT))


def lacks_descriptors(error: OSError) -> bool:
    """Whether a connection failed for want of a descriptor, which an error of a name lookup hides."""
    if not isinstance(error, socket.gaierror):
        return error.errno in _LACKING
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as now:
        return now.errno in _LACKING
    return False


class Complaint:
    """Says that none is left, once a minute."""

    def __init__(self) -> None:
        self._told_at = -TOLD_EVERY_S

    def tell(self) -> None:
        """One more connection failed for it."""
        now = time.monotonic()
        if now - self._told_at >= TOLD_EVERY_S:
            self._told_at = now
            log.error(
                "no file descriptor is left: requests and probes fail here, which is not their workers' fault"
            )
