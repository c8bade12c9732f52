"""What the machine's clients do, each time with what the model then expects."""

from collections.abc import Sequence

from tests.node.machine_held import Asked, Loading
from tests.node.machine_model import Model
from tests.node.machine_tier import Probe
from tests.node.machine_world import CHECKSUMS, CONTENT, Peer, part_bytes

from kvferry.identity.names import PartKey
from kvferry.identity.stripes import part_checksums
from kvferry.node.framing import join_checksums, split_checksums
from kvferry.node.state import Namespace
from kvferry.node.wire import (
    Abandon,
    Commit,
    Copied,
    Corrupt,
    EndLoad,
    Filled,
    Join,
    Lookup,
    Match,
    Message,
    Ping,
    Prefill,
    Reserve,
    Role,
)


class Clients(Model):
    """Engines, correct ones and others."""

    def tell(self, role: Role, number: int, message: Message) -> None:
        """A message that is not answered at once; the node may close the connection over it."""
        peer = self.peer(role, number)
        if not self.world.say(peer, message):
            self.gone(peer)

    def ask(
        self,
        who: int,
        space: Namespace,
        chunks: Sequence[bytes],
        *,
        first: int = 0,
        wait_s: float = 1.0,
        cap_s: float = 0.0,
        per_token_s: float = 0.0,
    ) -> Probe | None:
        """Look a prefix up. Returns what the tier is asked for it."""
        peer, wanted = self.peer(Role.SCHEDULER, who), chunks[first:]
        asked, probes = self._asked(peer, space, wanted, first=first, wait_s=wait_s)
        assert self.world.say(
            peer,
            Lookup(
                ticket=self.tickets,
                request_id=f"r{self.tickets}",
                namespace=space.namespace,
                chunks=b"".join(chunks),
                first_chunk=first,
                prompt_tokens=len(chunks) * space.chunk_tokens + 1,
                prefill=Prefill(0.0, per_token_s, 0.0),
                max_wait_s=wait_s,
                deadline_cap_s=cap_s,
            ),
        )
        return self._its_probe(asked, probes)

    def match(
        self, who: int, space: Namespace, chunks: Sequence[bytes], *, wait_s: float = 1.0
    ) -> Probe | None:
        """Ask what could be loaded. Returns what the tier is asked for it."""
        peer = self.peer(Role.SCHEDULER, who)
        asked, probes = self._asked(peer, space, chunks, first=0, wait_s=wait_s)
        message = Match(
            ticket=self.tickets, namespace=space.namespace, chunks=b"".join(chunks), max_wait_s=wait_s
        )
        assert self.world.say(peer, message)
        return self._its_probe(asked, probes)

    def _asked(
        self, peer: Peer, space: Namespace, wanted: Sequence[bytes], *, first: int, wait_s: float
    ) -> tuple[Asked, list[Probe]]:
        """A question that is about to be asked, and what the tier has been asked before."""
        self.tickets += 1
        memory = {
            (at, part)
            for at, chunk in enumerate(wanted)
            for part in space.parts
            if self.world.visible(PartKey(space.namespace, chunk, part)) is not None
        }
        asked = Asked(peer, space, wanted, first, self.clock.now + wait_s, memory)
        self.asked[peer, self.tickets] = asked
        asked.crowded = self.wants_more_than_its_share(peer)
        return asked, list(self.tier.probes) if self.tier is not None else []

    def _its_probe(self, asked: Asked, before: Sequence[Probe]) -> Probe | None:
        if self.tier is not None:
            asked.probe = next((probe for probe in self.tier.probes if probe not in before), None)
        return asked.probe

    def end(self, loading: Loading) -> None:
        """The request is done, or aborted."""
        self.world.say(loading.peer, EndLoad(load_id=loading.load_id))
        self.ending.append(loading)

    def join(self, who: int, loading: Loading, part: int) -> None:
        """A rank listens."""
        peer = self.peer(Role.WORKER, who)
        loading.joined.setdefault((peer, part), loading.first_chunk + len(loading.chunks))
        self.world.say(peer, Join(load_id=loading.load_id, epoch=self.epoch, part=part))

    def copy(self, who: int, loading: Loading, at: tuple[int, int]) -> None:
        """Copy a part, verify the copy, and say what came of it."""
        given = loading.places.pop(at)
        key = loading.key(*at)
        view = self.world.arena.view(given.offset, part_bytes(key))
        if part_checksums(view) == split_checksums(given.checksums):
            assert bytes(view) == CONTENT[key]
            self.tell(Role.WORKER, who, Copied(load_id=loading.load_id, part=at[1], chunks=(at[0],)))
        else:
            comes = at[0] < loading.first_chunk + self.world.app.loads._loads[loading.load_id].load.end
            self.tell(Role.WORKER, who, Corrupt(load_id=loading.load_id, part=at[1], chunk=at[0]))
            assert not comes or self.keepers is None or key not in self.keepers.values

    def reserve(
        self, who: int, space: Namespace, part: int, *, prefix: Sequence[bytes], wanted: Sequence[bytes]
    ) -> list[PartKey]:
        """Ask for slots. Returns what may be written now."""
        peer = self.peer(Role.WORKER, who)
        message = Reserve(
            ticket=0, namespace=space.namespace, part=part, prefix=b"".join(prefix), chunks=b"".join(wanted)
        )
        self.world.say(peer, message)
        keys = [PartKey(space.namespace, chunk, part) for chunk in wanted]
        self.reserved(peer, keys)
        return [key for key in keys if self.lease(peer, key) is not None]

    def finish(self, who: int, keys: Sequence[PartKey], *, kept: bool) -> None:
        """Commit or abandon parts of one number, reserved or not."""
        if not keys:
            return
        peer = self.peer(Role.WORKER, who)
        for key in keys:
            lease = self.lease(peer, key)
            if lease is None:
                self.saves["lease-ended"] += kept
                continue
            self.writing.remove(lease)
            lease.view[:] = CONTENT[key]
            if lease.expires > self.clock.now:
                self.saves["committed" if kept else "abandoned"] += 1
            else:
                self.saves["lease-ended"] += kept
        space, part = keys[0].namespace, keys[0].part
        if kept:
            filled = tuple(Filled(key.chunk, join_checksums(CHECKSUMS[key])) for key in keys)
            self.world.say(peer, Commit(namespace=space, part=part, filled=filled))
        else:
            chunks = b"".join(key.chunk for key in keys)
            self.world.say(peer, Abandon(namespace=space, part=part, chunks=chunks))

    def owned(self, who: int) -> list[PartKey]:
        """What that worker may write, of one namespace and part."""
        peer = self.peer(Role.WORKER, who)
        keys = [writing.key for writing in self.writing if writing.peer is peer]
        return [key for key in keys if (key.namespace, key.part) == (keys[0].namespace, keys[0].part)]


def nonsense(space: Namespace, digest: bytes, *, load_id: int, epoch: int) -> tuple[Message, ...]:
    """Well-formed on the wire, and not to be done."""
    name, parts = space.namespace, len(space.part_bytes)
    return (
        Reserve(ticket=0, namespace=name, part=parts, prefix=b"", chunks=digest),
        Reserve(ticket=0, namespace=name, part=0, prefix=b"", chunks=digest[:7]),
        Commit(namespace=name, part=0, filled=(Filled(digest, b""),)),
        Commit(namespace=name, part=parts, filled=(Filled(digest, bytes(16)),)),
        Abandon(namespace=b"?" * 16, part=0, chunks=digest),
        Join(load_id=load_id, epoch=epoch, part=4000),
        Ping(),
    )
