"""What the proxy allows, and for how long it waits."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Times in seconds.

    body_bytes: of one request. held_bytes: of all requests that are here at a time. waiting: requests that
    wait for a place. per_worker: requests that a worker gets at a time. queue_s: how long one waits for a
    place. connect_s: for a connection to a worker. first_byte_s: from the request to the first byte of its
    answer. idle_s: between bytes of an answer. head_s: for a head to come, once it has begun; a client's
    body may take as long, and one second more for each body_rate bytes. keep_s: an idle client connection is
    kept. stall_s: a client that takes no bytes. drain_s: for requests in flight when the router stops.
    clients: connections. spare_s: an idle connection to a worker is kept; vLLM's closes after 5 s.
    """

    body_bytes: int = 64 << 20
    held_bytes: int = 1 << 30
    waiting: int = 4096
    per_worker: int = 1024
    queue_s: float = 60.0
    connect_s: float = 3.0
    first_byte_s: float = 600.0
    idle_s: float = 120.0
    head_s: float = 10.0
    body_rate: int = 32 << 10
    keep_s: float = 75.0
    stall_s: float = 60.0
    drain_s: float = 120.0
    clients: int = 16384
    spare_s: float = 4.0
    apart_bytes: int = 256 << 10
    """Bodies from here on are read on another thread."""
