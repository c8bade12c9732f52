"""The clock by which parts age: what outlives a restart cannot be told by a monotonic one."""

import time


def unix_s() -> float:
    """Seconds since 1970. Where this clock jumps, ages are wrong and nothing else: it ends no wait."""
    return time.clock_gettime(time.CLOCK_REALTIME)
