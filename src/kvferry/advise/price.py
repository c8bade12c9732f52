"""What a shared cache earns and costs in a month, at a given hit rate. Money in US dollars, months of 730 h.

Benefit: GPU hours not spent on reading prompts again, GPU hours that a higher throughput saves, purchases
deferred. Cost: memory, disk, objects and their requests, traffic between zones, anything else. The last two
benefits were measured or planned at the hit rate given, and shrink with the hits that are added.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, NamedTuple

from kvferry.errors import MisconfiguredError

HOURS = 730.0
"""Of a month."""
LOW_REUSE = 0.05
ROUNDING = 1e-9
STEP = 0.25
"""How far each input is moved to see what the answer hangs on."""


@dataclass(frozen=True, slots=True)
class Deal:
    """Everything that the answer depends on.

    gpus: of the fleet. gpu_usd_hour: of one. requests_s: mean over the month. prompt_tokens: mean of a
    request. prefill_tokens_s: of one GPU that does nothing else. hit_rate: share of the prompt tokens that
    would not be computed with the shared cache; own_hit_rate: the same without it (engines' own memory,
    host memory). throughput_gain: of what a GPU does besides prefill, 0.1 for 10%. deferred_usd_month: of
    purchases put off. bytes_per_token: of KV, of a whole replica. ram_gib and so on: capacities of the
    shared tiers; the *_usd_gib are per GiB and month. objects_read_share: of the tokens hit, read from
    objects. object_bytes: of one. far_share: of the bytes loaded and stored that cross zones; zone_usd_gb:
    per GB of 10^9 bytes, both ends. other_usd_month: anything else. replicas: engine processes that could
    share. working_set_gib, host_gib: what is used again, and host memory for KV that a replica has anyway;
    0: unknown. long_gaps: users come back after hours or restarts, when host memory has forgotten them.
    """

    gpus: float
    gpu_usd_hour: float
    requests_s: float
    prompt_tokens: float
    prefill_tokens_s: float
    hit_rate: float
    own_hit_rate: float
    bytes_per_token: float
    ram_gib: float
    ram_usd_gib: float
    disk_gib: float = 0.0
    disk_usd_gib: float = 0.0
    objects_gib: float = 0.0
    objects_usd_gib: float = 0.0
    objects_read_share: float = 0.0
    object_bytes: float = float(16 << 20)
    read_usd_million: float = 0.0
    write_usd_million: float = 0.0
    far_share: float = 0.0
    zone_usd_gb: float = 0.0
    throughput_gain: float = 0.0
    deferred_usd_month: float = 0.0
    other_usd_month: float = 0.0
    replicas: int = 2
    working_set_gib: float = 0.0
    host_gib: float = 0.0
    long_gaps: bool = False

    def __post_init__(self) -> None:
        """Raises MisconfiguredError."""
        if not 0 <= self.own_hit_rate <= self.hit_rate <= 1:
            raise MisconfiguredError(
                f"hit rates {self.own_hit_rate:g} without and {self.hit_rate:g} with the cache: "
                "give shares of the prompt tokens from 0 to 1, the second no lower than the first"
            )
        for name in (
            "gpus",
            "gpu_usd_hour",
            "requests_s",
            "prompt_tokens",
            "prefill_tokens_s",
            "object_bytes",
        ):
            if not getattr(self, name) > 0:
                raise MisconfiguredError(f"{name} is {getattr(self, name):g}; it must be more than 0")

    @property
    def tokens_month(self) -> float:
        """Prompt tokens asked for."""
        return self.requests_s * HOURS * 3600 * self.prompt_tokens

    @property
    def fleet_hours(self) -> float:
        """GPU hours of the fleet."""
        return self.gpus * HOURS

    def prefill_hours(self, hit_rate: float) -> float:
        """GPU hours a month that the prompts take at that hit rate."""
        return self.tokens_month * (1 - hit_rate) / self.prefill_tokens_s / 3600


class Part(Enum):
    """Of the answer; the value says it to people."""

    REREAD = "GPU hours not spent on reading again"
    THROUGHPUT = "more throughput per GPU"
    DEFERRED = "purchases put off"
    RAM = "memory of the cache"
    DISK = "disk"
    OBJECTS = "object storage"
    REQUESTS = "object requests"
    ZONES = "traffic between zones"
    OTHER = "other"


BENEFITS = (Part.REREAD, Part.THROUGHPUT, Part.DEFERRED)


class No(Enum):
    """Why not to buy, whatever the sum says."""

    SINGLE = "a single engine process has nobody to share with: its own prefix cache and host memory do it"
    FITS = (
        "the working set fits into the host memory of each replica, and users do not come back after long "
        "gaps: offload to host memory, and route by prefix"
    )
    LOW_REUSE = "the shared cache would add less than 5 points of hit rate"
    NO_PREFILL = (
        "the prompts need more GPU hours than the fleet has, even with the cache: it is short of prefill, "
        "which only GPUs bring"
    )
    COSTS_MORE = "it costs more than it brings"


class Moved(NamedTuple):
    """An input at another value, and the net of a month that this would give."""

    value: float
    net_usd: float


@dataclass(frozen=True, slots=True)
class Answer:
    """usd: per part and month, all positive. gpu_hours: saved a month. break_even: None where none exists.

    sensitivity: input -> a quarter less and a quarter more of it, shares at most 1; the widest first.
    """

    usd: Mapping[Part, float]
    benefit_usd: float
    cost_usd: float
    gpu_hours: float
    break_even: float | None
    reasons: tuple[No, ...]
    sensitivity: Mapping[str, tuple[Moved, Moved]]

    @property
    def net_usd(self) -> float:
        """Of a month."""
        return self.benefit_usd - self.cost_usd


def parts(deal: Deal) -> dict[Part, float]:
    """Dollars a month, by part."""
    gain = deal.throughput_gain / (1 + deal.throughput_gain)
    loaded, stored = _loaded_bytes(deal), _stored_bytes(deal)
    has_objects = 1.0 if deal.objects_gib else 0.0
    reads = loaded * deal.objects_read_share * has_objects / deal.object_bytes
    writes = stored * has_objects / deal.object_bytes
    return {
        Part.REREAD: _saved_hours(deal) * deal.gpu_usd_hour,
        Part.THROUGHPUT: _other_hours(deal) * gain * deal.gpu_usd_hour,
        Part.DEFERRED: deal.deferred_usd_month,
        Part.RAM: deal.ram_gib * deal.ram_usd_gib,
        Part.DISK: deal.disk_gib * deal.disk_usd_gib,
        Part.OBJECTS: deal.objects_gib * deal.objects_usd_gib,
        Part.REQUESTS: (reads * deal.read_usd_million + writes * deal.write_usd_million) / 1e6,
        Part.ZONES: (loaded + stored) / 1e9 * deal.far_share * deal.zone_usd_gb,
        Part.OTHER: deal.other_usd_month,
    }


def answer(deal: Deal) -> Answer:
    """What the cache is worth."""
    usd = parts(deal)
    benefit = sum(usd[part] for part in BENEFITS)
    cost = sum(amount for part, amount in usd.items() if part not in BENEFITS)
    return Answer(
        usd, benefit, cost, _saved_hours(deal), _break_even(deal), _reasons(deal), _sensitivity(deal)
    )


def _saved_hours(deal: Deal) -> float:
    """No more than the fleet has: what it could not compute anyway is no saving."""
    without = min(deal.prefill_hours(deal.own_hit_rate), deal.fleet_hours)
    return max(0.0, without - deal.prefill_hours(deal.hit_rate))


def _other_hours(deal: Deal) -> float:
    """What the fleet does besides reading prompts, without the cache."""
    return max(0.0, deal.fleet_hours - deal.prefill_hours(deal.own_hit_rate))


def net_usd(deal: Deal) -> float:
    """Of a month."""
    return _net_at(deal, deal.hit_rate)


def _net_at(deal: Deal, hit_rate: float) -> float:
    """At another hit rate: what was measured at the deal's shrinks and grows with the hits added."""
    added = deal.hit_rate - deal.own_hit_rate
    scale = (hit_rate - deal.own_hit_rate) / added if added > ROUNDING else 0.0
    usd = parts(replace(deal, hit_rate=hit_rate))
    if hit_rate != deal.hit_rate:
        for part in (Part.THROUGHPUT, Part.DEFERRED):
            usd[part] *= scale
    return sum(amount if part in BENEFITS else -amount for part, amount in usd.items())


def _break_even(deal: Deal) -> float | None:
    """The lowest hit rate, from the own one up, at which it costs nothing."""
    low, high = deal.own_hit_rate, 1.0
    if _net_at(deal, low) >= 0:
        return low
    if _net_at(deal, high) < 0:
        return None
    for _ in range(60):  # the net bends where the fleet's hours end, so it is searched and not solved
        middle = (low + high) / 2
        if _net_at(deal, middle) < 0:
            low = middle
        else:
            high = middle
    return high


def _reasons(deal: Deal) -> tuple[No, ...]:
    found = {
        No.SINGLE: deal.replicas <= 1,
        No.FITS: 0 < deal.working_set_gib <= deal.host_gib and not deal.long_gaps,
        No.LOW_REUSE: deal.hit_rate - deal.own_hit_rate < LOW_REUSE - ROUNDING,
        No.NO_PREFILL: deal.prefill_hours(deal.hit_rate) > deal.fleet_hours,
        No.COSTS_MORE: net_usd(deal) <= 0,
    }
    return tuple(reason for reason, holds in found.items() if holds)


_SHARES = ("hit_rate", "own_hit_rate", "far_share", "objects_read_share")
_NOT_MOVED = ("replicas", "working_set_gib", "host_gib", "long_gaps", "object_bytes")


def _sensitivity(deal: Deal) -> dict[str, tuple[Moved, Moved]]:
    found: dict[str, tuple[Moved, Moved]] = {}
    for field in fields(deal):
        value = getattr(deal, field.name)
        if field.name not in _NOT_MOVED and value:
            found[field.name] = (
                _moved(deal, field.name, value * (1 - STEP)),
                _moved(deal, field.name, value * (1 + STEP)),
            )
    return dict(sorted(found.items(), key=lambda item: -abs(item[1][1].net_usd - item[1][0].net_usd)))


def _moved(deal: Deal, name: str, value: float) -> Moved:
    """As far as there is such a share."""
    if name in _SHARES:
        value = min(1.0, value)
    if name == "hit_rate":
        value = max(value, deal.own_hit_rate)
        return Moved(value, _net_at(deal, value))
    if name == "own_hit_rate":
        value = min(value, deal.hit_rate)
    changed: dict[str, Any] = {name: value}
    return Moved(value, net_usd(replace(deal, **changed)))


def explain(deal: Deal) -> tuple[str, ...]:
    """The formula with its numbers, a line for each step."""
    usd, saved = parts(deal), _saved_hours(deal)
    per_gpu = f"{deal.prefill_tokens_s:,.0f} tokens/s / 3600"
    lines = [
        f"prompt tokens = {_plain(deal.requests_s)} requests/s x {HOURS:g} h x 3600 s x "
        f"{deal.prompt_tokens:,.0f} tokens = {deal.tokens_month:,.0f} a month",
        f"prefill without = prompt tokens x (1 - {deal.own_hit_rate:g}) / {per_gpu} = "
        f"{deal.prefill_hours(deal.own_hit_rate):,.0f} GPU hours",
        f"prefill with = prompt tokens x (1 - {deal.hit_rate:g}) / {per_gpu} = "
        f"{deal.prefill_hours(deal.hit_rate):,.0f} GPU hours",
        f"fleet = {_plain(deal.gpus)} GPUs x {HOURS:g} h = {deal.fleet_hours:,.0f} GPU hours",
        f"saved = min(without, fleet) - with, at least 0 = {saved:,.0f} GPU hours",
        f"{Part.REREAD.value} = saved x ${_plain(deal.gpu_usd_hour)} = ${usd[Part.REREAD]:,.0f}",
        f"{Part.THROUGHPUT.value} = (fleet - without, at least 0) x {deal.throughput_gain:g} / "
        f"{1 + deal.throughput_gain:g} x ${_plain(deal.gpu_usd_hour)} = ${usd[Part.THROUGHPUT]:,.0f}",
        f"{Part.DEFERRED.value} = ${deal.deferred_usd_month:,.0f}",
        *(
            f"{part.value} = {gib:,.0f} GiB x ${_plain(price)} per GiB and month = ${usd[part]:,.0f}"
            for part, gib, price in (
                (Part.RAM, deal.ram_gib, deal.ram_usd_gib),
                (Part.DISK, deal.disk_gib, deal.disk_usd_gib),
                (Part.OBJECTS, deal.objects_gib, deal.objects_usd_gib),
            )
        ),
        f"loaded = prompt tokens x ({deal.hit_rate:g} - {deal.own_hit_rate:g}) x "
        f"{deal.bytes_per_token:,.0f} bytes = {_loaded_bytes(deal) / 1e9:,.0f} GB",
        f"stored = prompt tokens x (1 - {deal.hit_rate:g}) x {deal.bytes_per_token:,.0f} bytes = "
        f"{_stored_bytes(deal) / 1e9:,.0f} GB",
        f"{Part.REQUESTS.value} = (loaded x {deal.objects_read_share:g} x ${_plain(deal.read_usd_million)} + "
        f"stored x ${_plain(deal.write_usd_million)}) / {deal.object_bytes:,.0f} bytes / 10^6 = "
        f"${usd[Part.REQUESTS]:,.0f}" + ("" if deal.objects_gib else ", since there are no objects"),
        f"{Part.ZONES.value} = (loaded + stored) x {deal.far_share:g} x ${_plain(deal.zone_usd_gb)} per GB = "
        f"${usd[Part.ZONES]:,.0f}",
        f"{Part.OTHER.value} = ${deal.other_usd_month:,.0f}",
        f"net = ${sum(usd[part] for part in BENEFITS):,.0f} - "
        f"${sum(amount for part, amount in usd.items() if part not in BENEFITS):,.0f}",
    ]
    return tuple(lines)


def _plain(number: float) -> str:
    """Without an exponent above 1."""
    return f"{number:,.0f}" if number >= 1e5 else f"{number:g}"


def _loaded_bytes(deal: Deal) -> float:
    """A month."""
    return deal.tokens_month * (deal.hit_rate - deal.own_hit_rate) * deal.bytes_per_token


def _stored_bytes(deal: Deal) -> float:
    """A month: every prompt token that was computed."""
    return deal.tokens_month * (1 - deal.hit_rate) * deal.bytes_per_token
