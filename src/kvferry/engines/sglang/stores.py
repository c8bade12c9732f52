"""What the backend needs of a node: one store for every pool's namespace."""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvferry.client.messages import NamespaceInfo
from kvferry.client.store import PrefixStore
from kvferry.engines.sglang.settings import BackendSettings

Copy = Callable[[int, int, memoryview], None]


class PageStore(Protocol):
    """What is used of ``PrefixStore``."""

    @property
    def last_error(self) -> str: ...
    def wait_connected(self, timeout_s: float) -> bool: ...
    def match(self, digests: Sequence[bytes]) -> int: ...
    def load(self, digests: Sequence[bytes], into: Copy) -> int: ...
    def save(self, prefix: Sequence[bytes], digests: Sequence[bytes], fill: Copy) -> int: ...
    def close(self) -> None: ...


def open_store(settings: BackendSettings, namespace: NamespaceInfo, *, engine: str, token: str) -> PageStore:
    """Returns at once, whether there is a node or not."""
    return PrefixStore(
        socket_path=settings.socket,
        engine=engine,
        namespace=namespace,
        token=token,
        group=settings.group,
        deadline_s=settings.deadline_s,
    )
