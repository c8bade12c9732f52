"""Who drops from which tier: this host's node, keepers, or for want of them we ourselves at Valkey."""

import argparse
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvferry.cli.address import asked
from kvferry.cli.keepers import are_named, fleet, keeper_addresses
from kvferry.cli.prompt import Prompt, prompt_of
from kvferry.config import NODE_SETTINGS, parse_valkey
from kvferry.errors import ClosedError, KvferryError, MisconfiguredError, RefusedError, RetryError
from kvferry.identity.names import DOMAIN_TAG_BYTES, NAMESPACE_BYTES
from kvferry.sources import gathered, parsed

if TYPE_CHECKING:
    from kvferry.client.admin import AdminClient
    from kvferry.keeper.admin import Fleet
    from kvferry.tiers.valkey.url import ValkeyUrl

ALL, MEMORY, VALKEY, DISK = "all", "memory", "valkey", "disk"
OK = "ok"
DRAIN_S = 10.0  # for what the node is still writing to Valkey
DROP_S = 3600.0  # of a Valkey, by ourselves
URL_VARIABLE = "KVFERRY_VALKEY"
_POLL_S = 0.1
_TAG = 2 * DOMAIN_TAG_BYTES
_DIGITS = 2 * NAMESPACE_BYTES
_NO_MEMORY = "name the node's --socket, or run kvferry drop memory on its host"


@dataclass(frozen=True, slots=True)
class Gone:
    """What went from one tier at one place. error: why not all of it did; empty when it did."""

    tier: str
    where: str
    parts: int = 0
    nbytes: int = 0
    error: str = ""

    def document(self) -> dict[str, object]:
        """For programs."""
        return {
            "tier": self.tier,
            "where": self.where,
            "dropped_parts": self.parts,
            "dropped_bytes": self.nbytes,
            "error": self.error,
        }


class Droppers:
    """Asks the node only where it is needed. All that it opens is the stack's to close."""

    def __init__(
        self,
        args: argparse.Namespace,
        stack: ExitStack,
        *,
        namespace: str,
        request: str | None,
        older_than_s: float,
    ) -> None:
        """namespace: in hexadecimal, or its beginning; empty for all. older_than_s: 0 for any age."""
        self._args = args
        self._stack = stack
        self._digits = namespace
        self._request = request
        self._older_than_s = older_than_s
        self._named = True
        self._away = ""  # why there is no node
        self._unasked = ""  # why there are no keepers, though some are named

    def drop(self, tiers: Sequence[str], *, named: bool = False) -> list[Gone]:
        """From these, as far as they are there. named: the one that was asked for must be.

        Of several, in this order and once more: what was on its way from one to another is caught then. What
        no node was there to drop from memory, or no keeper from what is behind it, is an error of its own.
        """
        self._named = named
        if named:
            return [gone for tier in tiers for gone in self._drop(tier)]
        there = [tier for tier in tiers if self._has(tier)]
        if not there:
            if self._unasked:
                raise ClosedError(self._unasked)
            raise RefusedError("there is no tier to drop from; start the node, or name --keepers or --valkey")
        try:
            gone = [gone for tier in there for gone in self._drop(tier)]
            self._drain()
            gone += [gone for tier in there for gone in self._drop(tier)]
        finally:
            unheard = self._ended()
        if MEMORY in tiers and not self._reachable:
            gone.append(Gone(MEMORY, "this node", error=f"untouched, for {self._away}; {_NO_MEMORY}"))
        if self._unasked:
            gone.append(Gone(ALL, "the keepers", error=f"untouched, for {self._unasked}"))
        failed = {each.where for each in gone if each.error}
        return _together(gone) + [each for each in unheard if each.where not in failed]

    # -- who there is --------------------------------------------------------------------------------

    @cached_property
    def _node(self) -> "AdminClient":
        return self._stack.enter_context(asked(self._args))

    @cached_property
    def _status(self) -> dict[str, Any]:
        return self._node.status()

    @cached_property
    def _reachable(self) -> bool:
        """Whether there is a node that answers. One that refuses us is an error."""
        try:
            return bool(self._status)
        except (RefusedError, MisconfiguredError):
            raise
        except KvferryError as error:
            self._away = str(error)
            return False

    @cached_property
    def _behind(self) -> str:
        """The name of the tier behind the node's memory; empty for none."""
        tier = self._status.get("tier") if self._reachable else None
        return str(tier["name"]) if isinstance(tier, dict) else ""

    @cached_property
    def _fleet(self) -> "Fleet | None":
        of_node = ""
        if not are_named(self._args) and self._reachable:
            of_node = keeper_addresses(self._status)
        try:
            keepers = fleet(self._args, of_node=of_node)
        except (ClosedError, RetryError) as error:
            if self._named:
                raise
            self._unasked = str(error)
            return None
        return self._stack.enter_context(keepers) if keepers is not None else None

    @cached_property
    def _kept(self) -> frozenset[str]:
        """Tiers of the keepers."""
        return frozenset() if self._fleet is None else self._fleet.tiers()

    @cached_property
    def _prompt(self) -> Prompt | None:
        return None if self._request is None else prompt_of(self._node, self._request)

    @cached_property
    def _namespace(self) -> bytes:
        """Empty for all."""
        if self._prompt is not None:
            return self._prompt.namespace
        if len(self._digits) in (0, _DIGITS):
            return bytes.fromhex(self._digits)
        return bytes.fromhex(known_namespace(self._status, self._digits))

    def _has(self, tier: str) -> bool:
        if tier == MEMORY:
            return self._reachable
        if tier == VALKEY and self._args.valkey is not None:
            return True
        if tier == VALKEY and self._behind == VALKEY:
            alone = self._fleet is None and bool(self._unasked)
            return not alone or self._request is not None or URL_VARIABLE in os.environ
        return tier in self._kept or tier == self._behind == DISK

    # -- dropping ------------------------------------------------------------------------------------

    def _drop(self, tier: str) -> list[Gone]:
        if tier == MEMORY:
            return [self._by_node(tier)]
        if tier == VALKEY and self._args.valkey is not None and self._request is None:
            return [self._by_ourselves()]
        if self._fleet is not None:
            return self._by_keepers(tier)
        if tier == self._behind and (tier == DISK or self._request is not None):
            return [self._by_node(tier)]
        if tier == VALKEY and URL_VARIABLE in os.environ and self._request is None:
            return [self._by_ourselves()]
        if tier == VALKEY and self._request is None:
            raise MisconfiguredError("nobody to drop from Valkey: name --keepers, or --valkey URL")
        has = f"the node has {self._behind or 'only its memory'}" if self._reachable else "no node answers"
        raise MisconfiguredError(
            f"nobody to drop from {tier}: {has}, and there are no keepers; name --keepers"
        )

    def _by_node(self, tier: str) -> Gone:
        chunks = b"" if self._prompt is None else b"".join(self._prompt.chunks)
        answer = self._node.drop(
            tier, namespace=self._namespace, older_than_s=self._older_than_s, chunks=chunks
        )
        parts, nbytes = answer.get("dropped_parts"), answer.get("dropped_bytes")
        if not isinstance(parts, int) or not isinstance(nbytes, int):
            raise RefusedError("the node did not say how much it dropped; kvferry status shows what it holds")
        return Gone(tier, "this node", parts, nbytes, _complaint(str(answer.get("outcome", OK))))

    def _by_keepers(self, tier: str) -> list[Gone]:
        if self._fleet is None:
            return []
        from kvferry.keeper.wire import DropTier
        from kvferry.tiers.contract import Dropped, Outcome

        answers = self._fleet.drop(
            DropTier(tier),
            namespace=b"" if self._prompt is not None else self._namespace,
            older_than_s=self._older_than_s,
            refs=() if self._prompt is None else self._prompt.all_refs(),
            alone=self._args.tier == tier,
        )
        bad = any(isinstance(each, Dropped) and each.outcome is not Outcome.OK for each in answers.values())
        known = self._fleet.troubles(tier) if bad else {}
        gone = [Gone(tier, "keepers", error=error) for error in self._fleet.errors]
        for name, dropped in answers.items():
            where = f"keeper {name}"
            if isinstance(dropped, KvferryError):
                gone.append(Gone(tier, where, error=str(dropped)))
            else:
                error = _complaint(dropped.outcome.value, known.get(name, ""))
                gone.append(Gone(tier, where, dropped.parts, dropped.nbytes, error))
        return gone

    def _by_ourselves(self) -> Gone:
        """Every key of that Valkey, in pages."""
        from kvferry.keeper.scan import Scanner, ScanSettings
        from kvferry.tiers.contract import Dropped
        from kvferry.tiers.valkey.settings import ValkeySettings
        from kvferry.tiers.valkey.tier import ValkeyTier

        url = valkey_url(self._args.valkey)
        ended = threading.Event()
        said: list[Dropped] = []

        def done(dropped: Dropped) -> None:
            said.append(dropped)
            ended.set()

        with ExitStack() as stack:
            tier = ValkeyTier.connect(ValkeySettings(url=url))
            stack.callback(tier.close)
            scanner = Scanner(tier.keyspace(), settings=ScanSettings(), found=lambda refs: None)
            stack.callback(scanner.close)
            scanner.drop(
                namespace=self._namespace or None, older_than_s=self._older_than_s or None, done=done
            )
            scanner.start()
            if not ended.wait(DROP_S):
                raise RetryError(f"{url} was not looked through within {DROP_S:.0f} s; repeat the command")
        return Gone(VALKEY, str(url), said[0].parts, said[0].nbytes, _complaint(said[0].outcome.value))

    def _ended(self) -> list[Gone]:
        """Tell keepers that the drop is over. Those that did not hear it, and why."""
        if self._fleet is None or self._request is not None:
            return []
        return [
            Gone(
                ALL,
                f"keeper {name}",
                error=f"it may have brought back some of it ({error}); repeat the command",
            )
            for name, error in self._fleet.drop_ended(namespace=self._namespace).items()
        ]

    def _drain(self) -> None:
        """Wait for what the node writes to Valkey: what memory had of it is gone from there soon."""
        give_up = time.monotonic() + DRAIN_S
        while self._reachable and time.monotonic() < give_up:
            if not self._node.status().get("writeback_backlog_bytes"):
                return
            time.sleep(_POLL_S)


def valkey_url(given: str | None, *, environ: Mapping[str, str] = os.environ) -> "ValkeyUrl":
    """From ``--valkey`` or the environment, and the password as for a node. Raises MisconfiguredError."""
    settings = [s for s in NODE_SETTINGS if s.target in ("valkey", "valkey_password")]
    known = {setting.variable for setting in settings}
    own = {name: value for name, value in environ.items() if name in known}
    texts = gathered(settings, {"valkey": given}, environ=own, config_path=None, others=())
    values = parsed(settings, texts)
    return parse_valkey(values["valkey"], texts["valkey"][1], values.get("valkey_password"))


def known_namespace(status: dict[str, Any], beginning: str) -> str:
    """The node's only namespace that begins so, with its domain's tag or behind it. Raises RefusedError."""
    spaces = status.get("namespaces")
    names = [str(space["namespace"]) for space in spaces] if isinstance(spaces, list) else []
    found = [name for name in names if beginning in (name[: len(beginning)], name[_TAG:][: len(beginning)])]
    if len(found) != 1:
        what = f"{len(found)} namespaces begin" if found else "no namespace begins"
        raise RefusedError(f"{what} with {beginning}; kvferry status --json lists the node's")
    return found[0]


def _complaint(outcome: str, reason: str = "") -> str:
    """reason: where it is known."""
    if outcome == OK:
        return ""
    again = "mend that, and repeat the command" if reason else "repeat the command"
    return f"not all of it is gone for good ({reason or outcome}); {again}"


def _together(gone: Sequence[Gone]) -> list[Gone]:
    """One of each tier and place. What was wrong the last time counts."""
    sums: dict[tuple[str, str], Gone] = {}
    for each in gone:
        known = sums.get((each.tier, each.where), Gone(each.tier, each.where))
        sums[each.tier, each.where] = Gone(
            each.tier, each.where, known.parts + each.parts, known.nbytes + each.nbytes, each.error
        )
    return list(sums.values())
