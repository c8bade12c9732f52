"""Shared tiers of several sizes for one fleet, what each would bring and cost, and the one that pays best."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvferry.advise.expect import Expected, Keeps, expect, held
from kvferry.advise.price import LOW_REUSE, Deal, Part, net_usd, parts
from kvferry.advise.question import Question
from kvferry.advise.served import Served
from kvferry.advise.shared import SharedTier, size_shared
from kvferry.advise.speed import HOST_BYTES_S, Link, host_link, prefill_s, valkey_link
from kvferry.advise.workload import Workload

GIB = 1 << 30
LONG_GAP_H = 1.0
UNPRICED = 1.0
UNLIMITED = 1e12


@dataclass(frozen=True, slots=True)
class Option:
    """A shared tier of one size, and what it brings.

    tokens: that it holds. intake: of what hosts can take in, the share that they would read.
    """

    tokens: float
    tier: SharedTier
    intake: float
    expected: tuple[Expected, Expected, Expected]
    link: Link
    deal: Deal


def option(question: Question, served: Served, load: Workload, tokens: float) -> Option:
    """A shared tier that holds so many tokens."""
    routing = question.routing
    hits = [held(served, load, keeps=keeps, shared_tokens=tokens, routing=routing) for keeps in Keeps]
    far = max(0.0, hits[2] - hits[1])
    tier = size_shared(
        conversation_bytes=served.copy_bytes(load.grown_tokens),
        conversations=tokens / load.grown_tokens,
        read_bytes_s=load.requests_s * far * served.copy_bytes(load.context_mean),
        started_s=load.requests_s / load.turns,
        resume_h=load.resume_h,
        shard=question.shard,
    )
    link = valkey_link(served.tensor, tier.sustained_bytes_s)
    intake = tier.read_bytes_s / (served.hosts * HOST_BYTES_S)
    links = (None, host_link(served.tensor), link)
    shares = (0.0, max(0.0, hits[1] - hits[0]), far)
    first, second, third = (
        expect(served, load, keeps=keeps, hit_rate=hit, link=behind, far_share=share, link_busy=intake)
        for keeps, hit, behind, share in zip(Keeps, hits, links, shares, strict=True)
    )
    expected = (first, second, third)
    return Option(tokens, tier, intake, expected, link, _deal(question, served, load, tier, expected))


def options_of(question: Question, served: Served, load: Workload) -> tuple[Option, ...]:
    """One for each size that the reuse is known at, up to what is enough; the last is that."""
    enough = load.curve.enough_tokens
    sizes = dict.fromkeys((*(tokens for tokens, _ in load.curve.points if tokens < enough), enough))
    return tuple(option(question, served, load, tokens) for tokens in sizes)


def best(options: Sequence[Option], *, priced: bool) -> Option:
    """The one with the highest net, of those that add some hit rate; without a price, what is enough."""
    adding = [found for found in options if found.deal.hit_rate >= found.deal.own_hit_rate + LOW_REUSE]
    if not priced or not adding:
        return options[-1]
    return max(adding, key=lambda found: net_usd(found.deal))


def prefill_rate(served: Served, load: Workload, expected: Sequence[Expected]) -> float:
    """Tokens a second of one GPU, of what the shared tier saves; without end where speed is unknown.

    What it saves is what the table says: the mean prefill without it less that with it. Where it saves
    nothing, that of whole prompts.
    """
    if served.compute is None:
        return UNLIMITED
    own, tier = expected[1], expected[2]
    if own.times and tier.times and tier.hit_rate > own.hit_rate:
        saved = own.times.prefill_s - tier.times.prefill_s
        if saved > 0:
            return load.context_mean * (tier.hit_rate - own.hit_rate) / saved / served.tensor
    return load.context_mean / prefill_s(served.compute, load.context_mean) / served.tensor


def _deal(
    question: Question, served: Served, load: Workload, tier: SharedTier, expected: Sequence[Expected]
) -> Deal:
    """As ``kvferry price`` counts it: the shared tier beside GPUs and host memory that are there anyway.

    GPU hours beyond those of the fleet, which the load would need and does not with the tier, are purchases
    put off: every hour counts once.
    """
    prices, grown = question.prices, load.grown_tokens
    local = served.copy_bytes(grown) * max(served.gpu_tokens(grown), served.host_tokens(grown)) / grown
    deal = Deal(
        gpus=served.gpus,
        gpu_usd_hour=prices.gpu_usd_hour or UNPRICED,
        requests_s=load.requests_s,
        prompt_tokens=load.context_mean,
        prefill_tokens_s=prefill_rate(served, load, expected),
        hit_rate=min(1.0, max(expected[1].hit_rate, expected[2].hit_rate)),
        own_hit_rate=min(1.0, expected[1].hit_rate),
        bytes_per_token=served.copy_bytes(load.context_mean) / load.context_mean,
        ram_gib=tier.machine_bytes / GIB,
        ram_usd_gib=prices.ram_usd_gib,
        disk_gib=tier.disk_bytes / GIB,
        disk_usd_gib=prices.disk_usd_gib,
        objects_gib=tier.bucket_bytes / GIB,
        objects_usd_gib=prices.objects_usd_gib,
        replicas=served.replicas,
        working_set_gib=load.curve.enough_tokens / grown * served.copy_bytes(grown) / served.replicas / GIB,
        host_gib=local / GIB,
        long_gaps=load.resume_h >= LONG_GAP_H,
    )
    before, after = (found.busy or 0.0 for found in expected[1:])
    within = parts(deal)[Part.REREAD] / deal.gpu_usd_hour
    beyond = max(0.0, max(0.0, before - after) * deal.fleet_hours - within)
    return replace(deal, deferred_usd_month=beyond * (prices.gpu_usd_hour or 0.0))
