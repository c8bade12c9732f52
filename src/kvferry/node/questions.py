"""What people and their programs ask of a node: status, explain, drop, a prompt's chunks, parts to fetch."""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from kvferry.identity.names import PartKey, PartRef
from kvferry.node.ages import Ages
from kvferry.node.counters import NodeStatistics
from kvferry.node.explain import visible_id
from kvferry.node.framing import split_digests
from kvferry.node.prefetch import Prefetches
from kvferry.node.server import Connection
from kvferry.node.state import Namespace, NodeState
from kvferry.node.wire import (
    Document,
    DropQuery,
    ExplainQuery,
    FetchQuery,
    FromClient,
    PromptQuery,
    StatusQuery,
    Tier,
)
from kvferry.pool.entries import EntryState
from kvferry.tiers.contract import Droppable, Dropped, Outcome

MEMORY = Tier.MEMORY.name.lower()
MAX_NAMED = 8  # request ids in an answer that says which there are


def document(content: object) -> Document:
    """As JSON."""
    return Document(json=msgspec.json.encode(content))


class Questions:
    """Loop thread only. statistics: of the whole node, for status."""

    def __init__(
        self, state: NodeState, prefetches: Prefetches, *, statistics: Callable[[], NodeStatistics]
    ) -> None:
        self._state = state
        self._prefetches = prefetches
        self._statistics = statistics
        self._ages = Ages()

    def after_turn(self) -> None:
        """At the end of every wake-up of the loop: all that was used is stamped by now."""
        self._ages.note(self._state.loop.clock(), self._state.catalogue.mark)

    def mark_at(self, when: float) -> int:
        """Of the pool: what is stamped below it was stamped by then; see ``ages``."""
        return self._ages.mark_at(when)

    def answer(self, connection: Connection, message: FromClient) -> bool:
        """Answer now or, with what a tier has to do for it, later. Whether it is one of these questions."""
        match message:
            case StatusQuery():
                connection.send(document(self._statistics()))
            case ExplainQuery(request_id=request_id):
                connection.send(document({"requests": self._state.explain.find(request_id)}))
            case PromptQuery(request_id=request_id):
                connection.send(self._prompt(request_id))
            case DropQuery():
                self._drop(connection, message)
            case FetchQuery():
                self._fetch(connection, message)
            case _:
                return False
        return True

    # -- which chunks ------------------------------------------------------------------------------

    def _prompt(self, wanted: str) -> Document:
        """The chunks of one request, and their sizes."""
        ids = [str(record["request_id"]) for record in self._state.explain.find(wanted)]
        if not ids:
            return Document(error=f"the node knows no request {wanted!r}; it keeps the newest few thousand")
        if len(ids) > 1:
            named = ", ".join(ids[:MAX_NAMED])
            return Document(error=f"{len(ids)} requests begin with {visible_id(wanted)}; give one of {named}")
        prompt = self._state.prompts.get(ids[0])
        space = None if prompt is None else self._state.namespaces.get(prompt.namespace)
        if prompt is None or space is None:
            return Document(
                error=f"of request {ids[0]} no chunks are known: it asked long ago, or for none, as what is "
                "shorter than a chunk, capped, or in the engine itself"
            )
        return document(
            {
                "request_id": prompt.request_id,
                "namespace": space.namespace.hex(),
                "label": space.label,
                "chunk_tokens": space.chunk_tokens,
                "part_bytes": space.part_bytes,
                "trailing": space.trailing,
                "chunks": [digest.hex() for digest in split_digests(prompt.digests)],
            }
        )

    # -- drop --------------------------------------------------------------------------------------

    def _drop(self, connection: Connection, message: DropQuery) -> None:
        space = self._state.namespaces.get(message.namespace)
        if message.namespace and space is None:
            error = f"unknown namespace {message.namespace.hex()}; kvferry status lists this node's"
            connection.send(Document(error=error))
        elif message.chunks and space is None:
            connection.send(Document(error="chunks are of a namespace; say which"))
        elif message.tier == MEMORY:
            connection.send(_dropped(self._forget(message, space)))
        else:
            self._drop_behind(connection, message, space)

    def _forget(self, message: DropQuery, space: Namespace | None) -> Dropped:
        """Out of host memory. What is being loaded or stored stays, unless it is named."""
        catalogue = self._state.catalogue
        if space is not None and message.chunks:
            return self._unlink(_refs(space, message.chunks))
        before = None
        if message.older_than_s:
            before = self._ages.mark_at(self._state.loop.clock() - message.older_than_s)
        parts = catalogue.statistics().dropped_parts
        freed = catalogue.drop(message.namespace or None, before=before)
        return Dropped(catalogue.statistics().dropped_parts - parts, freed)

    def _unlink(self, refs: Sequence[PartRef]) -> Dropped:
        """Not found any more from now on, also what arrives this moment."""
        catalogue = self._state.catalogue
        found = [ref for ref in refs if catalogue.state(ref.key) is EntryState.READY]
        for ref in refs:
            catalogue.unlink(ref.key)
        return Dropped(len(found), sum(ref.nbytes for ref in found))

    def _drop_behind(self, connection: Connection, message: DropQuery, space: Namespace | None) -> None:
        """Out of the tier behind memory."""
        state, tier = self._state, self._state.tier
        if tier is None or state.behind.name.lower() != message.tier:
            has = f"only {state.behind.name.lower()}" if tier is not None else "nothing"
            connection.send(Document(error=f"this node has {has} behind its memory, not {message.tier}"))
        elif space is not None and message.chunks:
            refs = _refs(space, message.chunks)

            def removed(outcomes: Sequence[Outcome]) -> None:
                state.loop.post(partial(connection.send, _dropped(_removed(refs, outcomes))))

            tier.remove(refs, done=removed)
        elif isinstance(tier, Droppable):
            tier.drop(
                namespace=message.namespace or None,
                older_than_s=message.older_than_s or None,
                done=lambda dropped: state.loop.post(partial(connection.send, _dropped(dropped))),
            )
        else:
            connection.send(
                Document(
                    error=f"a node drops from {message.tier} what a request names; keepers drop the rest"
                )
            )

    # -- fetch -------------------------------------------------------------------------------------

    def _fetch(self, connection: Connection, message: FetchQuery) -> None:
        space = self._state.namespaces.get(message.namespace)
        if space is None:
            connection.send(
                Document(
                    error=f"no engine of namespace {message.namespace.hex()} has come to this node since it "
                    "started; start one first"
                )
            )
            return
        chunks = split_digests(message.chunks)
        if len(chunks) != len(message.parts) or not all(part in space.parts for part in message.parts):
            connection.send(Document(error="these are no parts of that namespace"))
            return
        refs = [
            PartRef(PartKey(space.namespace, chunk, part), space.part_bytes[part])
            for chunk, part in zip(chunks, message.parts, strict=True)
        ]
        self._prefetches.begin(
            refs,
            within_s=message.within_s,
            mark=message.mark,
            done=lambda counts: connection.send(document(counts)),
        )


def _refs(space: Namespace, digests: bytes) -> list[PartRef]:
    """All parts that these chunks may have."""
    return [
        PartRef(PartKey(space.namespace, chunk, part), space.part_bytes[part])
        for chunk in split_digests(digests)
        for part in space.parts
    ]


def _removed(refs: Sequence[PartRef], outcomes: Sequence[Outcome]) -> Dropped:
    gone = [ref.nbytes for ref, outcome in zip(refs, outcomes, strict=True) if outcome is Outcome.OK]
    failed = [outcome for outcome in outcomes if outcome not in (Outcome.OK, Outcome.MISS)]
    return Dropped(len(gone), sum(gone), failed[0] if failed else Outcome.OK)


def _dropped(dropped: Dropped) -> Document:
    return document(
        {
            "dropped_parts": dropped.parts,
            "dropped_bytes": dropped.nbytes,
            "outcome": dropped.outcome.value,
        }
    )
