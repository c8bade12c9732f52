"""The servers that tests start: see ``kvferry.testing.servers``."""

from kvferry.testing.servers import (
    CLUSTER_OPTIONS,
    Cluster,
    Server,
    free_ports,
    must,
    open_descriptors,
    redis_binary,
    running_cluster,
    running_server,
    start_server,
    valkey_binary,
)

__all__ = [
    "CLUSTER_OPTIONS",
    "Cluster",
    "Server",
    "free_ports",
    "must",
    "open_descriptors",
    "redis_binary",
    "running_cluster",
    "running_server",
    "start_server",
    "valkey_binary",
]
