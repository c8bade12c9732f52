"""Whose request it is, and which ``cache_salt`` follows from that. Pure.

    API key ──► group (its own, or one that the trust file names) ──► salt ──► into the body
                                     a salt that the client sent is hashed under it ──┘

Requests share KV only where their salts are equal, so nobody may choose a salt that others have. Salts are
digests keyed with the routers' secret: routers with the same secret agree, and a salt tells no API key.
"""

import enum
import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from kvferry.errors import RefusedError
from kvferry.router.fields import is_object, joined, may_have, parts, spliced
from kvferry.secret import Secret

FIELD = "cache_salt"
TRANSFER = "kv_transfer_params"
PASSED_ON = ("sampling_params", "extra_args", "vllm_xargs", "extra_body")
HARMLESS = ("max_load_tokens",)  # in it: says how much, and not from where
MAX_SALT_CHARACTERS = 128  # as vLLM has it
MAX_KEY_BYTES = 4096
KEY_FIELDS = frozenset((b"authorization", b"x-api-key", b"api-key"))
SALT_BYTES = 16
# Without a secret of its own a router keys with this: salts are then no harder to find out than API keys are.
PUBLIC_SECRET = Secret("kvferry router: no trust_secret was given")
_CONTEXT = b"kvferry cache_salt 1\0"


class StrangerError(RefusedError):
    """Callers like this are not served: 401."""


class Unlisted(enum.Enum):
    """What becomes of a caller whom the trust file does not list. Values: as the file says it."""

    OWN = "own"  # each API key is a group; all without one are one
    SHARED = "shared"  # one group, without a salt
    REFUSE = "refuse"  # 401


class ClientSalt(enum.Enum):
    """What becomes of a ``cache_salt`` that came with a request. Values: as settings say it."""

    NAMESPACE = "namespace"  # keeps apart what the client wants apart, inside its group
    STRIP = "strip"
    TRUST = "trust"  # it counts as it is: a gateway in front has set it


class Unsalted(enum.Enum):
    """What becomes of prompts that no salt can be put into, where callers have one. Values: of the file."""

    REFUSE = "refuse"  # 403
    PASS = "pass"  # all such prompts are one group


class Caller(NamedTuple):
    """group: for people, nothing secret. salt: empty where the group has none. listed: in the trust file."""

    group: str
    salt: str
    listed: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """listed: groups by the SHA-256 of an API key. keyless: what counts for requests without a key.

    unsalted: a trust file that does not say it refuses.
    """

    unlisted: Unlisted = Unlisted.OWN
    keyless: Unlisted = Unlisted.SHARED
    client_salt: ClientSalt = ClientSalt.NAMESPACE
    unsalted: Unsalted = Unsalted.PASS
    listed: Mapping[bytes, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Trust:
    """secret: what salts are keyed with."""

    rules: Rules = Rules()
    secret: Secret = field(default=PUBLIC_SECRET, repr=False)

    def caller(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        """Who sent these headers. Raises StrangerError, and RefusedError for headers that say two things."""
        key = api_key(headers)
        if not key:
            return self._unlisted(self.rules.keyless, key)
        group = self.rules.listed.get(key_digest(key)) if self.rules.listed else None
        if group is None:
            return self._unlisted(self.rules.unlisted, key)
        return Caller(group, self._digest(b"group", group.encode()), listed=True)

    def parted(self, salt: str) -> bool:
        """Whether a request with this salt may reach no worker that does not read it."""
        return bool(salt) and self.rules.unsalted is Unsalted.REFUSE

    def settled(self, caller: Caller, body: bytes, *, plain: bool = False) -> tuple[str, bytes]:
        """The salt that a request has, empty for none, and its body with that salt and no other.

        plain: it was read, and has neither a salt nor ``TRANSFER``.

        Bodies that are no JSON objects stay as they are: no worker reads a salt in them. Raises RefusedError
        for a salt that no worker can use, and for objects that cannot be read.
        """
        if not body or not is_object(body):
            return caller.salt, body
        if plain:
            return caller.salt, spliced(body, _put(caller.salt))
        fields = parts(body) if may_have(body, (FIELD, TRANSFER)) else {}
        sent = client_salt(fields)
        if sent is None or self.rules.client_salt is ClientSalt.STRIP:
            salt = caller.salt
        elif self.rules.client_salt is ClientSalt.TRUST:
            salt = sent
        else:
            salt = self._digest(b"client", f"{caller.salt}\0{caller.group}\0{sent}".encode())
        put = _put(salt)
        if not fields:
            return salt, spliced(body, put)
        drop = [FIELD]
        if self.rules.client_salt is not ClientSalt.TRUST:
            refuse_inner_transfer(fields)
        if TRANSFER in fields and self.rules.client_salt is not ClientSalt.TRUST:
            drop.append(TRANSFER)
            put.update(harmless_transfer(fields[TRANSFER]))
        return salt, joined(fields, put, drop=drop)

    def _unlisted(self, rule: Unlisted, key: bytes) -> Caller:
        if rule is Unlisted.REFUSE:
            raise StrangerError(
                "this API key is not known here" if key else "an API key is wanted: Authorization: Bearer KEY"
            )
        if rule is Unlisted.SHARED:
            return Caller("shared", "")
        salt = self._digest(b"key", key)
        return Caller(f"key-{self._digest(b'name', key)[:12]}", salt)

    def _digest(self, kind: bytes, of: bytes) -> str:
        secret = self.secret.reveal().encode()
        return hmac.digest(secret, _CONTEXT + kind + b"\0" + of, "sha256")[:SALT_BYTES].hex()


def refuse_inner_transfer(fields: Mapping[str, msgspec.Raw]) -> None:
    """What says from where KV comes, inside a field that engines pass on. Raises RefusedError."""
    for name in PASSED_ON:
        if name in fields and may_have(bytes(fields[name]), (TRANSFER,)):
            raise RefusedError(f"{TRANSFER} in {name} is not taken from clients")


def _put(salt: str) -> dict[str, bytes]:
    return {FIELD: msgspec.json.encode(salt)} if salt else {}


def api_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """From ``Authorization: Bearer``, else ``x-api-key``; empty without one. Names of headers in any case.

    Raises RefusedError for two different ones: a worker may look at the other.
    """
    found: set[bytes] = set()
    for name, value in headers:
        lower = name.lower()
        if lower == b"authorization":
            scheme, _, rest = value.strip().partition(b" ")
            key = rest.strip() if scheme.lower() == b"bearer" else value.strip()
        elif lower in (b"x-api-key", b"api-key"):
            key = value.strip()
        else:
            continue
        if len(key) > MAX_KEY_BYTES:
            raise RefusedError(f"the API key in {lower.decode()} has over {MAX_KEY_BYTES} bytes")
        if key:
            found.add(key)
    if len(found) > 1:
        raise RefusedError("the headers carry different API keys: send one")
    return found.pop() if found else b""


def key_digest(key: bytes) -> bytes:
    """As the trust file lists it: what ``printf %s "$KEY" | sha256sum`` prints."""
    return hashlib.sha256(key).digest()


def harmless_transfer(raw: msgspec.Raw) -> dict[str, bytes]:
    """What a client may say about transfers of KV: no hosts, engines or blocks, which are others'."""
    try:
        given: object = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RefusedError(f"{TRANSFER} is no JSON object") from error
    kept = {name: given[name] for name in HARMLESS if name in given} if isinstance(given, dict) else {}
    return {TRANSFER: msgspec.json.encode(kept)} if kept else {}


def client_salt(fields: Mapping[str, msgspec.Raw]) -> str | None:
    """Of an object's fields. Raises RefusedError for one that would not do in a worker."""
    raw = fields.get(FIELD)
    if raw is None:
        return None
    try:
        salt: object = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RefusedError(f"{FIELD} is no JSON text") from error
    if salt is None:
        return None
    if not isinstance(salt, str):
        raise RefusedError(f"{FIELD} is of type {type(salt).__name__}: it must be a text")
    if not 0 < len(salt) <= MAX_SALT_CHARACTERS:
        raise RefusedError(f"{FIELD} has {len(salt)} characters: 1 to {MAX_SALT_CHARACTERS} can be used")
    if any(character in salt for character in "@/\\\0"):
        raise RefusedError(f"{FIELD} has one of @ / \\ NUL in it: workers refuse those")
    return salt
