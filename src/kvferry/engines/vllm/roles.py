"""What vLLM's ``kv_role`` lets an engine do with the shared cache."""

from enum import StrEnum


class KvRole(StrEnum):
    """vLLM's words for the sides of a prefill/decode split.

    The roles bind vLLM too: it keeps the blocks of steps in flight from being loaded into only where the
    connector may consume, so a producer must never load.
    """

    BOTH = "kv_both"
    PRODUCER = "kv_producer"
    CONSUMER = "kv_consumer"

    @property
    def loads(self) -> bool:
        """Whether requests are looked up."""
        return self is not KvRole.PRODUCER

    @property
    def stores(self) -> bool:
        """Whether what requests compute is stored."""
        return self is not KvRole.CONSUMER
