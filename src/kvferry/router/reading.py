"""What a request's body asks for, and the names of its prompt's prefixes. Pure.

Only what the choice needs is looked at; the worker judges the rest. What is refused here, with a 400, is a
body that no worker could answer: no JSON, or a prompt that is none.
"""

import re

import msgspec
import xxhash

from kvferry.errors import RefusedError
from kvferry.router.bodies import BODY, PLAIN_BODY, Body, PlainBody, canonical_json, text_of
from kvferry.router.contract import Key
from kvferry.router.keys import KeyChain
from kvferry.router.prompts import BUILDERS, KINDS, PLAIN_BUILDERS, Build, whole_blocks

MAX_REMEMBERED = 512  # tools and other heads, in their canonical form

_NOTHING = frozenset((b"", b"null"))
_AS_ABSENT = frozenset((b"[]", b"{}", b'{"type":"text"}'))
_IN_PROMPT = frozenset(("tools", "functions", "documents"))


class Reading(msgspec.Struct, frozen=True):
    """keys: shortest first; none where there is no prompt. own_salt: the caller's, in the keys where kept.

    model: "" where none is named. max_tokens: 0 where none is given. opening: a name of what the user said
    first, the same in all turns of a conversation and at all routers; where it was asked for.
    """

    model: str
    keys: tuple[Key, ...] = ()
    session: str = ""
    max_tokens: int = 0
    stream: bool = False
    own_salt: str | None = None
    opening: str = ""


_HEADS = tuple(name for name, kind in Body.__annotations__.items() if kind is msgspec.Raw)
# Of writers that escape what they need not, or what is no text; also "\\\\u", which is neither.
_ESCAPES = re.compile(rb"\\[u/]")


class Opened(msgspec.Struct, frozen=True):
    """A plain body: what it says, and how its prompt is named."""

    asked: PlainBody
    build: Build


class Reader:
    """seed: of the names; of this process alone. Not thread-safe."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._remembered: dict[bytes, tuple[bytes, int]] = {}
        self._recomputed = 0

    def read(
        self,
        path: str,
        body: bytes,
        salt: str = "",
        *,
        ignore_own_salt: bool = False,
        with_opening: bool = False,
    ) -> Reading:
        """One request's. salt: that the router puts in. Raises RefusedError.

        ignore_own_salt: the caller's is not passed on. A path that is not known is not judged.
        """
        opened = self.open(path, body)
        if opened is not None:
            return self.named(opened, salt, with_opening=with_opening)
        return self.whole(path, body, salt, ignore_own_salt=ignore_own_salt, with_opening=with_opening)

    def whole(
        self, path: str, body: bytes, salt: str, *, ignore_own_salt: bool, with_opening: bool
    ) -> Reading:
        """As ``read``, of a body that ``open`` does not take."""
        build = BUILDERS.get(_door(path))
        if build is None:
            return _unjudged(body)
        asked = _decoded(body)
        own = text_of("cache_salt", asked.cache_salt)
        kept = None if ignore_own_salt else own
        return self._reading(asked, build, salt, own, kept, with_opening=with_opening)

    def open(self, path: str, body: bytes, *, without: bytes = b"") -> Opened | None:
        """A body that can be named as it was written, and has no salt of the caller's.

        None: any other, which ``whole`` reads. without: also of what holds this anywhere.
        """
        build = PLAIN_BUILDERS.get(_door(path))
        if build is None or _ESCAPES.search(body) is not None or (without and without in body):
            return None
        try:
            asked = PLAIN_BODY.decode(body)
        except (msgspec.MsgspecError, RecursionError):
            return None
        return Opened(asked, build) if asked.cache_salt is msgspec.UNSET else None

    def named(self, opened: Opened, salt: str = "", *, with_opening: bool = False) -> Reading:
        """As ``read``."""
        return self._reading(opened.asked, opened.build, salt, None, None, with_opening=with_opening)

    def _reading(
        self, asked: Body, build: Build, salt: str, own: str | None, kept: str | None, *, with_opening: bool
    ) -> Reading:
        model = text_of("model", asked.model)
        try:
            named, length = self._heads(asked)
            recomputed = _recomputed(asked)
            if recomputed:  # nothing that is cached is of use to it: it shares no name with any other
                self._recomputed += 1
                named.append(("recomputed", self._recomputed.to_bytes(8, "little")))
            kind = KINDS[build]
            head = msgspec.msgpack.encode((kind, model, salt, kept, named))
            chain = KeyChain(head, length=length, seed=self._seed)
            build(asked, chain)
            opening = _opening(asked) if with_opening else ""
        except RecursionError:
            raise RefusedError("the body is nested too deeply") from None
        except msgspec.DecodeError as error:  # of what was only skipped before
            raise RefusedError(f"the body is not valid JSON: {error}") from None
        return Reading(
            model=model or "",
            keys=chain.keys()[-1:] if recomputed else chain.keys(),
            session=_session(asked),
            max_tokens=_max_tokens(asked),
            stream=asked.stream is True,
            own_salt=own,
            opening=opening,
        )

    def _heads(self, asked: Body) -> tuple[list[tuple[str, bytes]], int]:
        """What changes the whole prompt, by name; and how much of the prompt it is."""
        named: list[tuple[str, bytes]] = []
        length = 0
        for name in _HEADS:
            data = bytes(getattr(asked, name))
            if data not in _NOTHING:
                digest, size = self._canonical(data)
                if digest:
                    named.append((name, digest))
                    length += size if name in _IN_PROMPT else 0
        if asked.tool_choice == "none":
            named.append(("tool_choice", b"none"))
        return named, length

    def _canonical(self, data: bytes) -> tuple[bytes, int]:
        """A digest that does not depend on key order and space, b"" for what is as good as absent; length."""
        known = xxhash.xxh3_128_digest(data, self._seed)
        found = self._remembered.get(known)
        if found is None:
            canonical = canonical_json(msgspec.json.decode(data))
            digest = b"" if canonical in _AS_ABSENT else xxhash.xxh3_128_digest(canonical, self._seed)
            found = digest, len(canonical)
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[known] = found
        return found


def _door(path: str) -> str:
    return path.partition("?")[0].rstrip("/")


def _decoded(body: bytes) -> Body:
    try:
        return BODY.decode(body)
    except msgspec.ValidationError as error:
        raise RefusedError(f"the body is no request: {error}") from None
    except msgspec.DecodeError as error:
        raise RefusedError(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise RefusedError("the body is nested too deeply") from None


def _unjudged(body: bytes) -> Reading:
    """Of a path that is passed through: its model, if it names one."""
    if body[:1] == b"{":
        try:
            asked = BODY.decode(body)
        except (msgspec.MsgspecError, RecursionError):
            return Reading(model="")
        if isinstance(asked.model, str):
            return Reading(model=asked.model, stream=asked.stream is True)
    return Reading(model="")


def _session(asked: Body) -> str:
    for value in (asked.session_id, asked.prompt_cache_key, asked.user):
        if isinstance(value, str) and value:
            return value
    return ""


def _recomputed(asked: Body) -> bool:
    """Whether an engine computes all of the prompt, whatever it has cached: its tokens' probabilities are
    wanted."""
    likely = asked.logprobs if asked.top_logprobs is None else asked.top_logprobs
    return asked.prompt_logprobs is not None or (asked.echo is True and likely not in (None, False))


def _opening(asked: Body) -> str:
    """Of a chat: its first message by a user. A bare prompt has no beginning that later ones share."""
    messages = asked.messages if asked.messages is not None else asked.input
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            continue
        role, content = message.get("role"), message.get("content")
        if isinstance(role, msgspec.Raw):
            role, content = msgspec.json.decode(role), msgspec.json.decode(content or b"null")
        if role == "user":
            return xxhash.xxh3_128_hexdigest(canonical_json(whole_blocks(content)))
    return ""


def _max_tokens(asked: Body) -> int:
    for value in (asked.max_completion_tokens, asked.max_tokens, asked.max_output_tokens):
        if type(value) is int and value > 0:
            return value
    return 0


read = Reader().read
