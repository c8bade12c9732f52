"""The shared tier's size: memory, shards by capacity and by read bandwidth, disk and bucket behind it."""

import math
from dataclasses import dataclass

HEADROOM = 1.3
SUSTAINED = 7.4 / 11.25  # of the ceiling of three shards' networks, as published
SHARD_GBIT = 30.0  # that one memory-optimised 16xlarge adds
SHARD_BYTES = 450e9
SHARD_MACHINE_BYTES = 512 * (1 << 30)  # that one has, and is paid for
CLUSTER_LEAST = 3  # primaries of a Valkey Cluster
DISK_HOURS = 24.0


@dataclass(frozen=True, slots=True)
class Shard:
    """One Valkey server. capacity_bytes: for KV. machine_bytes: that are paid for."""

    capacity_bytes: float = SHARD_BYTES
    machine_bytes: float = SHARD_MACHINE_BYTES
    gbit_s: float = SHARD_GBIT

    @property
    def ceiling_bytes_s(self) -> float:
        """Of its network."""
        return self.gbit_s * 1e9 / 8

    @property
    def sustained_bytes_s(self) -> float:
        """That it reads for good."""
        return self.ceiling_bytes_s * SUSTAINED


@dataclass(frozen=True, slots=True)
class SharedTier:
    """What to set up. peak_bytes: all conversations at their longest; planned_bytes: 1.3 times that.

    read_bytes_s: mean. disk_bytes, bucket_bytes: for those who come back after hours; 0: none.
    """

    peak_bytes: float
    planned_bytes: float
    read_bytes_s: float
    by_capacity: int
    by_bandwidth: int
    shards: int
    shard: Shard
    disk_bytes: float
    bucket_bytes: float

    @property
    def sustained_bytes_s(self) -> float:
        """Of all shards."""
        return self.shards * self.shard.sustained_bytes_s

    @property
    def machine_bytes(self) -> float:
        """Memory that is paid for."""
        return self.shards * self.shard.machine_bytes


def size_shared(
    *,
    conversation_bytes: float,
    conversations: float,
    read_bytes_s: float,
    started_s: float,
    resume_h: float,
    shard: Shard,
) -> SharedTier:
    """BRIEF terms: KV bytes of a conversation x conversations in the reuse window + 30%.

    started_s: new conversations a second; those of the last 24 hours lie on disk, those before in a bucket.
    """
    peak = conversation_bytes * conversations
    planned = peak * HEADROOM
    capacity = max(1, math.ceil(planned / shard.capacity_bytes))
    bandwidth = max(1, math.ceil(read_bytes_s / shard.sustained_bytes_s))
    shards = max(capacity, bandwidth)
    if shards == 2:
        shards = CLUSTER_LEAST
    hours = max(0.0, resume_h)
    a_day = started_s * 3600 * conversation_bytes
    return SharedTier(
        peak_bytes=peak,
        planned_bytes=planned,
        read_bytes_s=read_bytes_s,
        by_capacity=capacity,
        by_bandwidth=bandwidth,
        shards=shards,
        shard=shard,
        disk_bytes=a_day * min(hours, DISK_HOURS),
        bucket_bytes=a_day * max(0.0, hours - DISK_HOURS),
    )
