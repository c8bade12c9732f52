"""The fleet that is broken: two replicas, a node, and a Valkey behind a proxy that can slow it down."""

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from kvferry.addresses import Address
from kvferry.bench import hook_times
from kvferry.demo.ask import Replica
from kvferry.demo.fleet import Fleet, FleetSettings, plan_replicas
from kvferry.demo.processes import wait_until
from kvferry.errors import RetryError
from kvferry.testing.faults import Corrupt
from kvferry.testing.holdings import NOTHING, Holdings
from kvferry.testing.proxy import Proxy
from kvferry.testing.servers import must
from kvferry.tiers.valkey.connection import Connection
from kvferry.tiers.valkey.resp import Reply
from kvferry.tiers.valkey.settings import ValkeySettings
from kvferry.tiers.valkey.stream import Until
from kvferry.tiers.valkey.url import ValkeyUrl

LOAD_S = 1.5  # how long a load takes through the slowed proxy: to be broken in its middle
ASK_VALKEY_S = 10.0
WITHIN_S = 120.0
QUIET_S = 0.1  # without a step
LOADS_FROM = "B"
STORES_FROM = "A"


class Stage:
    """A context manager, like the fleet inside it. times: directory of the timed connector."""

    def __init__(self, model: Path, *, times: Path, say: Callable[[str], None]) -> None:
        self.say = say
        self._times = times
        self.fleet = Fleet(
            FleetSettings(
                model=model,
                replicas=plan_replicas(2),
                connector=hook_times.CONNECTOR,
                engine_environment=((hook_times.DIRECTORY_VARIABLE, str(times)),),
            ),
            say=say,
        )
        self._proxy: Proxy | None = None
        self._valkey_port = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._proxy is not None:
                self._proxy.close()
        finally:
            self.fleet.__exit__(kind, error, trace)

    def start(self) -> None:
        """All of it."""
        self._start_valkey()
        self.fleet.start_node()
        self.fleet.start_replicas([STORES_FROM, LOADS_FROM])

    @property
    def a(self) -> Replica:
        """The replica that computes and stores."""
        return self.fleet.replicas[STORES_FROM]

    @property
    def b(self) -> Replica:
        """The replica that loads."""
        return self.fleet.replicas[LOADS_FROM]

    @property
    def proxy(self) -> Proxy:
        """Between the node and Valkey. RetryError before the start."""
        if self._proxy is None:
            raise RetryError("the fleet was not started")
        return self._proxy

    def hooks_s(self, replica: Replica) -> dict[str, float]:
        """Seconds that a replica's processes spent in the connector's methods so far, by method."""
        return hook_times.seconds_by_hook(self._times, group=self.fleet.process_group(replica.name))

    def wait_quiet(self, replica: Replica) -> None:
        """Until the replica's engine steps no more: what it does after an answer is not the next one's."""
        latest, since = self.hooks_s(replica), time.monotonic()

        def quiet() -> bool:
            nonlocal latest, since
            now = self.hooks_s(replica)
            if now != latest:
                latest, since = now, time.monotonic()
            return time.monotonic() - since >= QUIET_S

        wait_until(quiet, what=f"replica {replica.name} with nothing to do", timeout_s=WITHIN_S)

    def valkey(self, *words: str | bytes) -> Reply:
        """One command to the server itself."""
        address = Address("127.0.0.1", self._valkey_port)
        deadline = time.monotonic() + ASK_VALKEY_S
        settings = ValkeySettings(ValkeyUrl((address,)))
        connection = Connection.open(address, settings, tls=None, deadline=deadline)
        try:
            encoded = [word.encode() if isinstance(word, str) else word for word in words]
            return must(connection.request(*encoded, patience=Until(deadline)))
        finally:
            connection.close()

    def at_rest(self) -> float:
        """Wait until the node holds nothing for anybody; seconds that took."""
        view = self.fleet.node_view
        return wait_until(
            lambda: not Holdings.of(view.status()).beyond(NOTHING),
            what="the node getting back all it gave out",
            timeout_s=WITHIN_S,
        )

    # -- what breaks, and how it is mended ---------------------------------------------------------

    def kill_valkey(self) -> None:
        """And close its port: connections are refused."""
        self.proxy.close()
        self.fleet.kill_valkey()

    def restart_valkey(self) -> None:
        """An empty one, at the port that the node knows."""
        self._start_valkey()
        self.tier_is_up()

    def tier_is_up(self) -> None:
        """Wait until the node uses Valkey again."""
        self.fleet.node_view.wait(
            lambda status: status["tier"] is not None and status["tier"]["state"] == "up",
            what="Valkey being used again",
            timeout_s=WITHIN_S,
        )

    def fill_valkey(self) -> None:
        """Every write is answered with out of memory."""
        self.valkey("CONFIG", "SET", "maxmemory-policy", "noeviction")
        self.valkey("CONFIG", "SET", "maxmemory", "1")

    def empty_valkey(self) -> None:
        """There is room again."""
        self.valkey("CONFIG", "SET", "maxmemory", "0")

    def corrupt_values(self, *, after_bytes: int) -> None:
        """One byte of every stored value, and one on its way, which are so many bytes further on."""
        self.proxy.replies.once(Corrupt(after_bytes))
        keys = self.valkey("KEYS", "*")
        for key in keys if isinstance(keys, list) else []:
            if isinstance(key, bytes):
                at = str(int(str(self.valkey("STRLEN", key))) // 2)
                byte = self.valkey("GETRANGE", key, at, at)
                if isinstance(byte, bytes) and byte:
                    self.valkey("SETRANGE", key, at, bytes([(byte[0] + 1) % 256]))

    def _start_valkey(self) -> None:
        port = self._proxy.port if self._proxy is not None else 0
        self.fleet.start_valkey()
        self._valkey_port = int(self.fleet.valkey_url.rpartition(":")[2])
        self._proxy = Proxy(("127.0.0.1", self._valkey_port), port=port)
        self.fleet.valkey_url = f"valkey://127.0.0.1:{self._proxy.port}"
