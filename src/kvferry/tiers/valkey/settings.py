"""How the Valkey tier behaves: every limit in one place."""

import os
from dataclasses import dataclass, field

from kvferry.tiers.valkey.protection import Checksums, Protection
from kvferry.tiers.valkey.url import ValkeyUrl


def _fetch_connections() -> int:
    """One where cores are few: a second thread then costs more cache than it saves waiting."""
    cores = os.cpu_count() or 1
    return 1 if cores <= 4 else 2 if cores <= 16 else 4


@dataclass(frozen=True, slots=True)
class ValkeySettings:
    """``docs/decisions/valkey-threads.md`` has the measurements behind the defaults.

    fetch_connections, store_connections: per shard; one more serves probes, touches and removals.
    pipeline_depth, pipeline_bytes: commands and bytes in flight on one connection, at most.
    connect_s: longest wait for a connection to be made and greeted.
    stall_s: longest time in which nothing moves on a connection that owes a reply.
    idle_s: without an answer for so long a server is asked for one, in the background.
    survey_s: so often a server is asked for its settings and for how long it keeps values.
    queued_stripes: stripes waiting per shard and kind of work; more are refused.
    no_touch: nothing but a probe, a touch or a store makes a value look used (CLIENT NO-TOUCH): for one who
    reads in order to copy.
    protection: of the stored values, by checksum or encryption.
    """

    url: ValkeyUrl
    fetch_connections: int = field(default_factory=_fetch_connections)
    store_connections: int = 1
    pipeline_depth: int = 8
    pipeline_bytes: int = 24 << 20
    connect_s: float = 1.0
    stall_s: float = 0.5
    idle_s: float = 5.0
    survey_s: float = 60.0
    queued_stripes: int = 65536
    client_name: str = "kvferry"
    no_touch: bool = False
    protection: Protection = field(default_factory=Checksums)
