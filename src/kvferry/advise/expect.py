"""What to expect of a fleet: hit rate, time to the first token, throughput, by where KV is kept."""

import math
from dataclasses import dataclass
from enum import Enum

from kvferry.advise.served import Served
from kvferry.advise.speed import Compute, Link, decode_step_s, prefill_s
from kvferry.advise.workload import Workload

MAX_SEQUENCES = 256  # that an engine runs at once, unless told
BUSIEST = 0.95  # that a network is taken to be
ROUNDS = 60  # of looking for the batch that a load brings about


class Routing(Enum):
    """Which replica a conversation's next turn goes to."""

    AFFINITY = "affinity"  # the one it was on
    ROUND_ROBIN = "round-robin"  # any


class Keeps(Enum):
    """Where KV is kept; the value says it to people."""

    GPU = "GPU memory"
    HOST = "+ host memory"
    SHARED = "+ shared tier"


@dataclass(frozen=True, slots=True)
class Times:
    """Means, in seconds: of a request's prefill, its load, its wait in the queue; of a decode step.

    batch: answers at once at this load. full_step_s, full_batch: the same with as many as fit.
    """

    prefill_s: float
    load_s: float
    wait_s: float
    step_s: float
    batch: float
    full_step_s: float
    full_batch: int


@dataclass(frozen=True, slots=True)
class Expected:
    """Of one way to keep KV. Seconds, tokens a second; None where speed is unknown.

    hit_rate: share of the input tokens. computed_tokens_s: input tokens of the fleet that are not hit. busy:
    share of a replica's time that the load takes; above 1, the fleet is too small. ttft_s: mean, None where
    the queue grows for good. most_requests_s: that the fleet can serve. stream_tokens_s: of one answer.
    """

    keeps: Keeps
    hit_rate: float
    computed_tokens_s: float
    busy: float | None
    ttft_s: float | None
    most_requests_s: float | None
    stream_tokens_s: float | None
    times: Times | None


def held(served: Served, load: Workload, *, keeps: Keeps, shared_tokens: float, routing: Routing) -> float:
    """The hit rate of the whole fleet.

    Engines' own memory counts for what comes back to them: of N replicas, round robin finds the right one
    with chance 1/N. What is offloaded to the host is a copy, so that the larger of the two memories decides.
    A pool that the engines of a host share is found by all of them, with chance 1/hosts. Those who come back
    after hours find nothing in any of these, unless it lasts so long.
    """
    tokens = served.gpu_tokens(load.grown_tokens)
    if keeps is not Keeps.GPU:
        tokens = max(tokens, served.host_tokens(load.grown_tokens))
    found = load.curve.at(tokens * served.replicas)
    if routing is Routing.ROUND_ROBIN:
        found /= served.replicas
        if keeps is not Keeps.GPU:
            pools = served.pool_tokens(load.grown_tokens) * served.replicas
            found = max(found, load.curve.at(pools) / served.hosts)
    new = load.requests_s * (load.context_mean * (1 - found) + load.output_tokens)
    if tokens * served.replicas < new * load.resume_h * 3600:
        found *= 1 - load.resume_share
    if keeps is Keeps.SHARED:
        found = max(found, load.curve.at(shared_tokens))
    return found


def request_s(compute: Compute, load: Workload, hit_rate: float) -> tuple[float, float]:
    """Mean prefill time of a request, and the mean of its square.

    A request either finds all it could, and computes what is new, or computes everything.
    """
    if load.return_hit <= 0:
        seconds = prefill_s(compute, load.context_mean * (1 - hit_rate), load.context_mean * hit_rate)
        return seconds, seconds**2
    share = min(1.0, hit_rate / load.return_hit)
    warm = prefill_s(compute, load.new_tokens, load.context_mean - load.new_tokens)
    cold = prefill_s(compute, load.context_mean)
    return share * warm + (1 - share) * cold, share * warm**2 + (1 - share) * cold**2


def expect(
    served: Served,
    load: Workload,
    *,
    keeps: Keeps,
    hit_rate: float,
    link: Link | None,
    far_share: float,
    link_busy: float,
) -> Expected:
    """What that hit rate makes of the fleet.

    link: what the last tier loads through. far_share: of the input tokens, those that come over it.
    link_busy: the share of its time that all loads take.
    """
    computed = load.requests_s * load.context_mean * (1 - hit_rate)
    compute = served.compute
    if compute is None:
        return Expected(keeps, hit_rate, computed, None, None, None, None, None)
    rate = load.requests_s / served.replicas
    mean, square = request_s(compute, load, hit_rate)
    prefill = rate * mean
    tokens = load.context_mean + load.output_tokens / 2
    kv = served.gpu_bytes(tokens)
    most_batch = max(1, min(MAX_SEQUENCES, served.in_flight(load.context_mean + load.output_tokens)))
    batch = _batch(compute, rate * load.output_tokens, kv, left=1 - prefill, most=most_batch)
    step, full_step = (decode_step_s(compute, size, kv) for size in (batch, most_batch))
    least = full_step / most_batch
    busy = prefill + rate * load.output_tokens * least
    loading = link.seconds(served.copy_bytes(load.context_mean) * far_share) if link else 0.0
    loading /= 1 - min(link_busy, BUSIEST)
    wait = rate * square / (2 * (1 - prefill)) if prefill < 1 else math.inf
    return Expected(
        keeps=keeps,
        hit_rate=hit_rate,
        computed_tokens_s=computed,
        busy=busy,
        ttft_s=mean + loading + wait if busy < 1 else None,
        most_requests_s=served.replicas / (mean + load.output_tokens * least),
        stream_tokens_s=(1 - prefill) / step if busy < 1 else None,
        times=Times(mean, loading, wait, step, batch, full_step, most_batch),
    )


def _batch(compute: Compute, tokens_s: float, kv: float, *, left: float, most: int) -> float:
    """Answers that run at once where so many tokens a second are asked for: Little's law, by repetition.

    left: the share of time that prefill leaves.
    """
    if left <= 0:
        return float(most)
    batch = 1.0
    for _ in range(ROUNDS):
        batch = min(float(most), max(1.0, tokens_s * decode_step_s(compute, batch, kv) / left))
    return batch
