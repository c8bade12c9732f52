"""A trace reduced to what reuse depends on: sizes, and which request last had each part of a prompt.

Runs of blocks stand for blocks, so the policies cost by request, not by block.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvferry.errors import MisconfiguredError
from kvferry.traces.request import KEY_BYTES, Request
from kvferry.traces.tree import PrefixTree

UNKNOWN = -1
INFERRED = -2  # what a request continues: nobody says, and it has to be inferred from blocks
MAX_PROMPTS = 1 << 18  # the latest, whose continuation is noticed
MAX_REQUESTS = 50_000_000  # some 300 bytes each
MAX_SESSIONS = 1 << 22  # requests of sessions beyond count as of none


class ReuseLog:
    """Requests in the order of the trace, in columns.

    Per request: ``time_s`` (NaN: unknown), ``input_tokens``, ``output_tokens`` (UNKNOWN), ``blocks`` (UNKNOWN
    where content is not identified), ``session`` (a number per session, UNKNOWN), ``clock`` (times of
    different clocks have no difference), ``continued`` (the latest request whose prompt this one begins with;
    UNKNOWN: none, INFERRED: the trace has no messages).
    Per run: ``run_request`` (the latest request that had these blocks), ``run_blocks``; the runs of request r
    are those from ``first_run[r]`` to ``first_run[r + 1]``, in the order of the prompt.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.time_s = array("d")
        self.input_tokens = array("q")
        self.output_tokens = array("q")
        self.blocks = array("i")
        self.session = array("i")
        self.clock = array("i")
        self.continued = array("i")
        self._prompts: OrderedDict[int, int] = OrderedDict()  # digest -> request
        self.first_run = array("q", [0])
        self.run_request = array("i")
        self.run_blocks = array("i")
        self._sessions: dict[str, int] = {}
        self._tree = PrefixTree()

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def distinct_blocks(self) -> int:
        """Blocks that differ in content or in what comes before them."""
        return self._tree.blocks

    @property
    def sessions(self) -> int:
        """How many sessions the trace names."""
        return len(self._sessions)

    def add(self, request: Request, *, clock: int = 0) -> None:
        """Take in the next request of the trace. Raises MisconfiguredError beyond ``MAX_REQUESTS``."""
        number = len(self.blocks)
        if number >= MAX_REQUESTS:
            raise MisconfiguredError(f"more than {MAX_REQUESTS:,} requests; analyse a part of them")
        self.clock.append(clock)
        self.continued.append(self._continued(number, request.prefixes))
        self.time_s.append(float("nan") if request.time_s is None else request.time_s)
        self.input_tokens.append(request.input_tokens)
        self.output_tokens.append(UNKNOWN if request.output_tokens is None else request.output_tokens)
        session = UNKNOWN
        if request.session is not None:
            session = self._sessions.get(request.session, UNKNOWN)
            if session == UNKNOWN and len(self._sessions) < MAX_SESSIONS:
                session = self._sessions[request.session] = len(self._sessions)
        self.session.append(session)
        if request.blocks is None:
            self.blocks.append(UNKNOWN)
        else:
            self.blocks.append(len(request.blocks) // KEY_BYTES)
            for previous, blocks in self._tree.add(number, request.blocks).runs:
                self.run_request.append(previous)
                self.run_blocks.append(blocks)
        self.first_run.append(len(self.run_request))

    def _continued(self, number: int, prefixes: Sequence[int]) -> int:
        if not prefixes:
            return INFERRED
        earlier = next(
            (self._prompts[prefix] for prefix in reversed(prefixes[:-1]) if prefix in self._prompts), UNKNOWN
        )
        self._prompts[prefixes[-1]] = number
        self._prompts.move_to_end(prefixes[-1])
        if len(self._prompts) > MAX_PROMPTS:
            self._prompts.popitem(last=False)
        return earlier

    def runs(self, request: int) -> Iterator[tuple[int, int]]:
        """(earlier request, blocks) of one request, in the order of its prompt."""
        for run in range(self.first_run[request], self.first_run[request + 1]):
            yield self.run_request[run], self.run_blocks[run]

    def tokens(self, request: int, blocks: int) -> int:
        """Tokens in the first blocks of a prompt, whose last block may be partly filled."""
        return min(blocks * self.block_tokens, self.input_tokens[request])
