"""Which chunks recent requests asked for, so that a person can name a prefix by a request. Pure."""

from collections import OrderedDict
from dataclasses import dataclass

from kvferry.identity.names import DIGEST_BYTES

MAX_DIGESTS = 1 << 18
"""Of all requests together: 8 MiB, some 67 million tokens in chunks of 256."""
MAX_PROMPTS = 8192
"""Some 350 bytes each beside their digests."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """digests: of the prompt's chunks, from its start on, concatenated."""

    request_id: str
    namespace: bytes
    digests: bytes


class Prompts:
    """The newest ones, as many as ``max_digests`` chunks in all allow, and ``max_prompts`` at most."""

    def __init__(self, max_digests: int = MAX_DIGESTS, max_prompts: int = MAX_PROMPTS) -> None:
        self._max_prompts = max_prompts
        self._max_bytes = max_digests * DIGEST_BYTES
        self._nbytes = 0
        self._prompts: OrderedDict[str, Prompt] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prompts)

    def remember(self, request_id: str, namespace: bytes, digests: bytes) -> None:
        """A request looks these up. Asked again, as after a preemption, the longer list stays."""
        if not digests:
            return
        known = self._prompts.pop(request_id, None)
        if known is not None:
            self._nbytes -= len(known.digests)
            if known.namespace == namespace and len(known.digests) > len(digests):
                digests = known.digests
        self._prompts[request_id] = Prompt(request_id, namespace, digests)
        self._nbytes += len(digests)
        while self._nbytes > self._max_bytes or len(self._prompts) > self._max_prompts:
            self._nbytes -= len(self._prompts.popitem(last=False)[1].digests)

    def get(self, request_id: str) -> Prompt | None:
        """Of exactly this request."""
        return self._prompts.get(request_id)
