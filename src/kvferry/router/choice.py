"""Which worker: the one that costs least, in seconds, of those worth a look. Pure.

who holds the most of it (a few) + some of the others, at random ──► cost of each ──► cheapest
                   stay where the prefix is, unless leaving gains more than a trifle ◄──┘
"""

from collections.abc import Mapping, Sequence
from random import Random

from kvferry.errors import BrokenError
from kvferry.router.contract import Asked
from kvferry.router.explain import Cost, Record
from kvferry.router.flight import CostFlight, Known, Pool, PrefetchWish
from kvferry.router.knowledge import Knowledge, Sight
from kvferry.router.knowledge.sight import Depths
from kvferry.router.pricing import cost, decode_s

ALL_UP_TO = 24  # workers are looked at one and all; of more, these:
HOLDERS = 12
OTHERS = 12
STAY_S = 0.002  # what leaving the prefix's worker must gain at least,
STAY_SHARE = 0.05  # and as a share of the cost there
TIE_S = 0.0005  # costs this close, or
TIE_SHARE = 0.02  # this close, are equal
WORK_SHARE = 0.5  # of the work, in a pool all of which is busy

Candidate = tuple[Known, Cost, Depths | None]


class CostGuide:
    """A ``contract.Guide``. knowledge: of all pools. random: picks of equals, and who else is looked at."""

    name = "cost"

    def __init__(self, knowledge: Knowledge, *, random: Random) -> None:
        self.knowledge = knowledge
        self.pool = Pool(knowledge)
        self.ring = self.pool.ring
        self._random = random
        self._among: tuple[str, ...] = ()
        self._choosable: list[Known] = []
        self._numbers: dict[int, Known] = {}
        self._mask = 0

    def begin(self, asked: Asked, *, among: Sequence[str], now: float) -> CostFlight:
        """See ``Guide``."""
        self._consider(tuple(among))
        sight = self.knowledge.look(asked, self._mask)
        slope_s = self.pool.decodes.slope_s
        share = WORK_SHARE * self.pool.busy / max(len(self.pool.workers), 1)
        candidates: list[Candidate] = []
        for known in self._candidates(sight):
            price, depths = self._price(asked, sight, known, now, slope_s=slope_s, work_share=share)
            candidates.append((known, price, depths))
        (known, price, depths), reason = self._choose(candidates)
        record = Record(
            request_id=asked.request_id,
            model=asked.model,
            worker=known.url,
            reason=reason,
            workers=len(self._choosable),
            prompt_tokens=sight.prompt_tokens,
            expected=price,
            candidates=[(other.url, other_price) for other, other_price, _ in candidates],
        )
        return CostFlight(self.pool, asked, known, record, now, wish=_wish(known, price, depths))

    def worker_added(self, worker: str) -> None:
        """See ``Guide``."""
        self.pool.loads.added(worker)
        self.pool.know(worker)

    def worker_lost(self, worker: str) -> None:
        """See ``Guide``."""
        if self.pool.lose(worker):
            self._among = ()

    def explain(self, request_id: str) -> Mapping[str, object] | None:
        """See ``Guide``."""
        self.knowledge.settle()
        return self.ring.find(request_id)

    def statistics(self) -> Mapping[str, object]:
        """See ``Guide``."""
        return {
            "policy": self.name,
            "workers": self.pool.loads.statistics(),
            "knowledge": self.knowledge.statistics(),
        }

    def slowness(self, now: float) -> dict[str, float]:
        """By worker: what its prefills take, against what is predicted."""
        return {url: known.pace.factor(now) for url, known in self.pool.workers.items()}

    def _consider(self, among: tuple[str, ...]) -> None:
        if not among:
            raise BrokenError("no worker to choose from")
        if among != self._among:
            self._among = among
            self._choosable = [self.pool.know(url) for url in dict.fromkeys(among)]
            self._numbers = {known.worker.number: known for known in self._choosable}
            self._mask = sum(1 << number for number in self._numbers)

    def _candidates(self, sight: Sight) -> Sequence[Known]:
        """All of a few workers; of many, those with the most of the prompt, and others by chance."""
        choosable = self._choosable
        count = len(choosable)
        if count <= ALL_UP_TO:
            return choosable
        turn = self._random.randrange(count)
        chosen: dict[int, Known] = {}
        for number in self.knowledge.holding(sight, most=HOLDERS, turn=turn):
            holder = self._numbers.get(number)
            if holder is not None:
                chosen[number] = holder
        step = 1 + self._random.randrange(count - 1)
        for _ in range(OTHERS):
            other = choosable[turn]
            chosen[other.worker.number] = other
            turn = (turn + step) % count
        return list(chosen.values())

    def _price(
        self, asked: Asked, sight: Sight, known: Known, now: float, *, slope_s: float, work_share: float
    ) -> tuple[Cost, Depths | None]:
        knowledge = self.knowledge
        held, depths = knowledge.held(known.worker, sight)
        prefill = self.pool.prefill(known)
        factor = known.pace.factor(now)
        streams = self.pool.loads.of(known.url).decoding + known.pace.unseen
        space = depths.space if depths is not None else None
        price = cost(
            sight.prompt_tokens,
            held,
            bytes_per_token=space.chunk_bytes / space.chunk_tokens if space is not None else 0.0,
            tiers=knowledge.tiers(known.worker),
            prefill=prefill,
            factor=factor,
            wait_s=known.pace.wait_s(now, factor),
            decode_s=decode_s(slope_s, streams=streams, max_tokens=asked.max_tokens) if streams else 0.0,
            work_share=work_share,
        )
        return price, depths

    def _choose(self, candidates: Sequence[Candidate]) -> tuple[Candidate, str]:
        least = min(price.total_s for _, price, _ in candidates)
        home = max(candidates, key=_closeness)
        cost_s = home[1].total_s
        if home[1].engine_tokens and cost_s <= least + max(STAY_S, STAY_SHARE * cost_s):
            return home, "" if cost_s == least else "stays: leaving would gain too little"
        close = least + max(TIE_S, TIE_SHARE * least)
        ties = [candidate for candidate in candidates if candidate[1].total_s <= close]
        if len(ties) == 1:
            return ties[0], ""
        return self._random.choice(ties), f"one of {len(ties)} that cost about the same"


def _closeness(candidate: Candidate) -> tuple[int, float]:
    price = candidate[1]
    return price.engine_tokens, -price.total_s


def _wish(known: Known, price: Cost, depths: Depths | None) -> PrefetchWish | None:
    """What only a shared tier has, and is to be loaded."""
    node = known.worker.node
    if depths is None or node is None or price.cached_tokens <= price.memory_tokens:
        return None
    return PrefetchWish(node, depths.space.namespace, depths.link.digests)
