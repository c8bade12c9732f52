"""What a node does with each message. Decisions are elsewhere; this room routes and releases."""

import os
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial

from kvferry import __version__
from kvferry.errors import BrokenError, RefusedError
from kvferry.node.counters import EngineStatus, NamespaceStatus, NodeStatistics
from kvferry.node.estimate import Estimator
from kvferry.node.feed import Feed
from kvferry.node.feedserver import FeedStatistics
from kvferry.node.ledger import LedgerStatistics
from kvferry.node.loading import Loads
from kvferry.node.lookups import Lookups
from kvferry.node.prefetch import Prefetches
from kvferry.node.questions import Questions
from kvferry.node.saves import Saves
from kvferry.node.server import Connection
from kvferry.node.state import Namespace, NodeState
from kvferry.node.telling import Telling
from kvferry.node.wire import (
    PROTOCOL,
    Abandon,
    Attach,
    Attached,
    Came,
    Commit,
    Copied,
    Corrupt,
    EndLoad,
    FromClient,
    Hello,
    Join,
    Lookup,
    Match,
    Ping,
    Pong,
    Report,
    Reserve,
    Role,
    Welcome,
)

MAX_NAMESPACES_PER_CONNECTION = 64


class App:
    """``server.Handler`` of a node; loop thread only. statistics: of the whole node, for status.

    domain: the trust domain that is served; empty: that of the first engine that attaches. Its tag, which
    follows from its key, is the first engine's in any case: a node needs no key.
    """

    def __init__(
        self,
        state: NodeState,
        *,
        statistics: Callable[[], NodeStatistics],
        domain: str = "",
        feed: Feed | None = None,
    ) -> None:
        self.state = state
        self.feed = feed
        self.loads = Loads(state)
        self.telling = Telling(state)
        self.saves = Saves(state, self.loads, self.telling)
        self.estimator = Estimator(state)
        self.lookups = Lookups(state, self.loads, self.estimator, self.telling)
        prefetches = Prefetches(state, self.loads)
        self.questions = Questions(state, prefetches, statistics=statistics)
        if feed is not None:
            feed.begin(state, prefetches, self.questions.mark_at)
        self._domain = domain or None
        self._tag: bytes | None = None
        self._attached: dict[Connection, dict[bytes, Namespace]] = {}

    def welcome(self, connection: Connection, hello: Hello) -> Welcome:
        """See ``server.Handler``."""
        self._attached[connection] = {}
        return Welcome(
            protocol=PROTOCOL,
            version=__version__,
            epoch=self.state.epoch,
            pid=os.getpid(),
            pool_bytes=self.state.arena.nbytes,
            feed=self.feed is not None,
        )

    def closed(self, connection: Connection) -> None:
        """See ``server.Handler``."""
        if self.feed is not None:
            self.feed.closed(connection)
        self.lookups.disconnected(connection)
        self.loads.disconnected(connection)
        self.saves.disconnected(connection)
        self.state.pins.close(connection)
        self._attached.pop(connection, None)

    def refused(self, cause: str) -> None:
        """See ``server.Handler``."""
        self.state.counters.refused_connections[cause] += 1

    def message(self, connection: Connection, message: FromClient) -> None:
        """See ``server.Handler``."""
        match message:
            case Copied(load_id=load_id, part=part, chunks=chunks):
                self.loads.copied(load_id, part, chunks)
            case Lookup():
                space = self._space(connection, message.namespace)
                if self.feed is not None:
                    self.feed.asked(connection, message, space)
                self.lookups.lookup(connection, message, space)
            case Match():
                self.lookups.match(connection, message, self._space(connection, message.namespace))
            case Join(load_id=load_id, epoch=epoch, part=part):
                self.loads.join(connection, load_id, epoch=epoch, part=part)
            case EndLoad(load_id=load_id):
                # After another look at every socket: what a worker said before counts before the end.
                post = self.state.loop.post
                post(partial(post, partial(self.loads.end, load_id, asked_by=connection)))
            case Reserve():
                self.saves.reserve(connection, message, self._space(connection, message.namespace))
            case Commit():
                self.saves.commit(connection, message, self._space(connection, message.namespace))
            case Abandon():
                self.saves.abandon(connection, message, self._space(connection, message.namespace))
            case Corrupt(load_id=load_id, part=part, chunk=chunk):
                self.loads.corrupt(load_id, part, chunk)
            case _:
                self._rare_message(connection, message)

    def engines(self) -> tuple[EngineStatus, ...]:
        """Who is connected; admin connections are not engines."""
        found: list[EngineStatus] = []
        for connection, spaces in self._attached.items():
            hello = connection.hello
            if hello is None or hello.role is Role.ADMIN:
                continue
            space = next(iter(spaces.values()), None)
            found.append(
                EngineStatus(
                    engine=hello.engine,
                    role=hello.role.value,
                    rank=hello.rank,
                    pid=hello.pid,
                    version=hello.version,
                    label=space.label if space is not None else "",
                    domain=space.domain if space is not None else "",
                    loads=self.loads.count(connection),
                    reservations=self.saves.count(connection),
                    namespace=space.namespace.hex() if space is not None else "",
                )
            )
        return tuple(found)

    def after_turn(self) -> None:
        """At the end of every wake-up of the loop."""
        self.loads.after_turn()
        self.questions.after_turn()
        self.telling.after_turn()
        if self.feed is not None:
            self.feed.after_turn()

    def _rare_message(self, connection: Connection, message: FromClient) -> None:
        match message:
            case Attach():
                self._attach(connection, message)
            case Report():
                self.state.explain.report(message, self.state.loop.clock())
                self.state.counters.engine_failed_tokens += message.failed_tokens
                if self.feed is not None:
                    self.feed.reported(connection, message)
            case Came():
                space = self._space(connection, message.namespace)
                if self.feed is not None:
                    self.feed.came(connection, message, space)
            case Ping():
                connection.send(Pong())
            case _ if not self.questions.answer(connection, message):
                raise RefusedError(f"unexpected {type(message).__name__}")

    def _attach(self, connection: Connection, message: Attach) -> None:
        spaces = self._attached[connection]
        space = Namespace(
            namespace=message.namespace,
            part_bytes=message.part_bytes,
            chunk_tokens=message.chunk_tokens,
            domain=message.domain,
            label=message.label,
            trailing=message.trailing if any(message.trailing) else (),
        )
        try:
            self._check_domain(space)
            if len(spaces) >= MAX_NAMESPACES_PER_CONNECTION:
                raise RefusedError(f"a connection has {MAX_NAMESPACES_PER_CONNECTION} namespaces at most")
            known = self.state.namespaces.get(message.namespace)
            if known is not None and replace(known, label=space.label) != space:
                raise RefusedError(
                    f"namespace {message.namespace.hex()} is in use with other sizes: {known.chunk_tokens} "
                    f"tokens, {known.part_bytes} bytes per chunk and trailing {known.trailing}, not "
                    f"{space.chunk_tokens}, {space.part_bytes} and {space.trailing}"
                )
            self.state.catalogue.register(
                space.namespace, space.part_bytes, space.domain, trailing=space.trailing
            )
        except RefusedError as refusal:
            connection.send(Attached(namespace=message.namespace, error=str(refusal)))
            return
        self._domain, self._tag = space.domain, space.tag
        self.state.namespaces[space.namespace] = space
        first = not spaces
        spaces[space.namespace] = space
        if self.feed is not None:
            self.feed.attached(connection, message, space)
        attached = Attached(namespace=message.namespace)
        if first and connection.hello is not None and connection.hello.role is not Role.ADMIN:
            connection.send_now(attached, self.state.arena.fd)
        else:
            connection.send(attached)

    def _check_domain(self, space: Namespace) -> None:
        if self._domain not in (None, space.domain):
            raise RefusedError(
                f"this node serves the trust domain {self._domain!r}, the engine is of {space.domain!r}; "
                "run a node of its own for it, with another --socket, or restart this one"
            )
        if self._tag not in (None, space.tag):
            raise RefusedError(
                f"the engine's key for the trust domain {space.domain!r} is not that of this node's first "
                "engine; give both the same key file, or restart the node when the key has changed"
            )

    def _space(self, connection: Connection, namespace: bytes) -> Namespace:
        space = self._attached[connection].get(namespace)
        if space is None:
            raise RefusedError(f"namespace {namespace.hex()} was not attached on this connection")
        return space


def snapshot(
    app: App,
    *,
    started: float,
    socket_path: str,
    huge_bytes: int,
    prepared_bytes: int,
    quota: LedgerStatistics | None,
    feed: FeedStatistics | None = None,
) -> NodeStatistics:
    """Of the whole node. Raises BrokenError when the node is closed."""
    state = app.state
    if state.arena.closed:
        raise BrokenError("statistics of a node that is closed")
    return NodeStatistics(
        pid=os.getpid(),
        version=__version__,
        epoch=state.epoch,
        uptime_s=state.loop.clock() - started,
        socket_path=socket_path,
        pool_bytes=state.arena.nbytes,
        huge_bytes=huge_bytes,
        prepared_bytes=prepared_bytes,
        catalogue=state.catalogue.statistics(),
        tier=state.tier.statistics() if state.tier is not None else None,
        keepers=state.keepers.statistics() if state.keepers is not None else None,
        quota=quota,
        feed=feed,
        write_rate=state.limits.write_rate,
        engines=app.engines(),
        namespaces=tuple(
            NamespaceStatus(space.namespace.hex(), space.label, space.domain, space.chunk_tokens)
            for space in state.namespaces.values()
        ),
        counters=deepcopy(state.counters),
        loads=len(app.loads),
        fetches=app.loads.fetches,
        writeback_backlog_bytes=app.saves.backlog.backlog_bytes,
        overdue_reservations=app.saves.overdue,
        writeback_backlog_parts=app.saves.backlog.backlog_parts,
        defects=state.loop.defects,
    )
