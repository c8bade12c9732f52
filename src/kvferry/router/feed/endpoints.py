"""Where plain engines publish their KV events, as people write it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

from kvferry.errors import MisconfiguredError
from kvferry.values import parse_count, parse_text


class Ports(NamedTuple):
    """events: of PUB. replay: of ROUTER; 0: it has none."""

    events: int
    replay: int = 0


@dataclass(frozen=True, slots=True)
class KvEvents:
    """ports: on every worker's host; None: only of ``others``, workers by their URL."""

    ports: Ports | None = None
    others: Mapping[str, Ports] = field(default_factory=dict)

    def of(self, worker: str) -> tuple[str, str] | None:
        """Endpoints of a worker, the second empty where nothing is replayed; None: it publishes nothing."""
        ports = self.others.get(worker, self.ports)
        if ports is None:
            return None
        host = urlsplit(worker).hostname or ""
        host = f"[{host}]" if ":" in host else host
        replay = f"tcp://{host}:{ports.replay}" if ports.replay else ""
        return f"tcp://{host}:{ports.events}", replay


def parse_kv_events(text: object) -> KvEvents:
    """``none``, ``PORT[:REPLAY]`` or ``WORKER=PORT[:REPLAY]``, with commas between. MisconfiguredError."""
    ports, others = None, {}
    for word in parse_text(text).split(","):
        worker, named, written = word.strip().rpartition("=")
        if named:
            if urlsplit(worker).scheme not in ("http", "https"):
                raise MisconfiguredError(f"{worker!r} is no worker; write http://gpu1:8000=5557")
            others[worker.rstrip("/")] = _ports(written)
        elif written != "none":
            ports = _ports(written)
    return KvEvents(ports, others)


def _ports(text: str) -> Ports:
    events, _, replay = text.partition(":")
    first = parse_count(events, lowest=1, highest=65535)
    return Ports(first, parse_count(replay, lowest=1, highest=65535) if replay else 0)
