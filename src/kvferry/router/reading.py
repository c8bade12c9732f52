"""What a request's body asks for, and the names of its prompt's prefixes. Pure.

Only what the choice needs is looked at; the worker judges the rest. What is refused here, with a 400, is a
body that no worker could answer: no JSON, or a prompt that is none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from kvferry.errors import RefusedError
from kvferry.router.contract import Key
from kvferry.router.keys import MAX_BOUNDARIES, KeyChain, Mark

MAX_REMEMBERED = 512  # tools and other heads, in their canonical form
MAX_TOKEN_ID = (1 << 32) - 1

_ABSENT = msgspec.Raw()
_NOTHING = frozenset((b"", b"null"))
_TEXT_PARTS = frozenset(("text", "input_text", "output_text"))
_AS_ABSENT = frozenset((b"[]", b"{}", b'{"type":"text"}'))
_IN_PROMPT = frozenset(("tools", "functions", "documents"))


@dataclass(frozen=True, slots=True)
class Reading:
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


class _Body(msgspec.Struct):
    """Of all paths together. Raw: changes the whole prompt, and is only compared."""

    model: Any = None
    messages: Any = None
    prompt: Any = None
    input: Any = None
    instructions: Any = None
    stream: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None
    cache_salt: Any = None
    prompt_cache_key: Any = None
    session_id: Any = None
    user: Any = None
    tool_choice: Any = None
    echo: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    prompt_logprobs: Any = None
    tools: msgspec.Raw = _ABSENT
    functions: msgspec.Raw = _ABSENT
    response_format: msgspec.Raw = _ABSENT
    text: msgspec.Raw = _ABSENT
    reasoning: msgspec.Raw = _ABSENT
    reasoning_effort: msgspec.Raw = _ABSENT
    chat_template: msgspec.Raw = _ABSENT
    chat_template_kwargs: msgspec.Raw = _ABSENT
    documents: msgspec.Raw = _ABSENT
    mm_processor_kwargs: msgspec.Raw = _ABSENT
    add_special_tokens: msgspec.Raw = _ABSENT
    truncate_prompt_tokens: msgspec.Raw = _ABSENT
    previous_response_id: msgspec.Raw = _ABSENT
    conversation: msgspec.Raw = _ABSENT
    lora_path: msgspec.Raw = _ABSENT


_HEADS = tuple(name for name, kind in _Body.__annotations__.items() if kind is msgspec.Raw)
_BODY = msgspec.json.Decoder(_Body)
_CANONICAL = msgspec.json.Encoder(order="sorted")

Build = Callable[["_Body", "KeyChain"], None]


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
        build = _BUILDERS.get(path.partition("?")[0].rstrip("/"))
        if build is None:
            return _unjudged(body)
        asked = _decoded(body)
        model, own = _text("model", asked.model), _text("cache_salt", asked.cache_salt)
        kept = None if ignore_own_salt else own
        try:
            named, length = self._heads(asked)
            recomputed = _recomputed(asked)
            if recomputed:  # nothing that is cached is of use to it: it shares no name with any other
                self._recomputed += 1
                named.append(("recomputed", self._recomputed.to_bytes(8, "little")))
            head = msgspec.msgpack.encode((build.__name__, model, salt, kept, named))
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

    def _heads(self, asked: _Body) -> tuple[list[tuple[str, bytes]], int]:
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
            canonical = _canonical_json(msgspec.json.decode(data))
            digest = b"" if canonical in _AS_ABSENT else xxhash.xxh3_128_digest(canonical, self._seed)
            found = digest, len(canonical)
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[known] = found
        return found


def _decoded(body: bytes) -> _Body:
    try:
        return _BODY.decode(body)
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
            asked = _BODY.decode(body)
        except (msgspec.MsgspecError, RecursionError):
            return Reading(model="")
        if isinstance(asked.model, str):
            return Reading(model=asked.model, stream=asked.stream is True)
    return Reading(model="")


def _text(name: str, value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise RefusedError(f"{name} is {_kind(value)}: it must be text")


def _kind(value: object) -> str:
    """As JSON calls it."""
    names = {dict: "an object", list: "an array", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "text" if isinstance(value, str) else "null")


def _session(asked: _Body) -> str:
    for value in (asked.session_id, asked.prompt_cache_key, asked.user):
        if isinstance(value, str) and value:
            return value
    return ""


def _recomputed(asked: _Body) -> bool:
    """Whether an engine computes all of the prompt, whatever it has cached: its tokens' probabilities are
    wanted."""
    likely = asked.logprobs if asked.top_logprobs is None else asked.top_logprobs
    return asked.prompt_logprobs is not None or (asked.echo is True and likely not in (None, False))


def _opening(asked: _Body) -> str:
    """Of a chat: its first message by a user. A bare prompt has no beginning that later ones share."""
    messages = asked.messages if asked.messages is not None else asked.input
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") == "user":
            return xxhash.xxh3_128_hexdigest(_canonical_json(message.get("content")))
    return ""


def _max_tokens(asked: _Body) -> int:
    for value in (asked.max_completion_tokens, asked.max_tokens, asked.max_output_tokens):
        if type(value) is int and value > 0:
            return value
    return 0


def _canonical_json(value: object) -> bytes:
    return _CANONICAL.encode(value)


def _chat(asked: _Body, chain: KeyChain) -> None:
    messages = asked.messages
    if not isinstance(messages, list):
        raise RefusedError("messages is missing" if messages is None else f"messages is {_kind(messages)}")
    if not messages:
        raise RefusedError("messages is empty: there is nothing to answer")
    unnamed = len(messages) - MAX_BOUNDARIES
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise RefusedError(f"messages[{number}] is {_kind(message)}: it must be an object")
        role = message.get("role")
        if not isinstance(role, str):
            raise RefusedError(f"messages[{number}] has no role")
        content, named = message.get("content"), number >= unnamed
        if isinstance(content, str) and len(message) == 2:
            chain.message(role, content, named=named)
        else:
            _message(chain, f"messages[{number}]", role, message, named=named)


def _message(chain: KeyChain, name: str, role: str, message: dict[str, Any], *, named: bool = True) -> None:
    """One message of a chat, or one item of a response's input."""
    chain.mark(Mark.MESSAGE, role)
    content = message.get("content")
    if isinstance(content, str):
        chain.mark(Mark.TEXT)
        chain.text(content)
    elif isinstance(content, list):
        for part in content:
            _part(chain, part)
    elif content is not None:
        raise RefusedError(f"{name}.content is {_kind(content)}: it must be text or an array of parts")
    if len(message) > 2 or content is None or "role" not in message:
        for field in sorted(message.keys() - {"role", "content"}):
            value = message[field]
            if value is not None and value != []:
                chain.mark(Mark.FIELD, field)
                chain.mark(Mark.VALUE)
                chain.raw(_canonical_json(value))
    chain.boundary(named=named)


def _part(chain: KeyChain, part: object) -> None:
    """Text counts the same whether it is the whole content or a part of it."""
    if isinstance(part, str):
        chain.mark(Mark.TEXT)
        chain.text(part)
    elif isinstance(part, dict) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str):
        chain.mark(Mark.TEXT)
        chain.text(part["text"])
    else:
        chain.media(xxhash.xxh3_128_digest(_canonical_json(part)))


def _completion(asked: _Body, chain: KeyChain) -> None:
    _prompts(chain, "prompt", asked.prompt)


def _embedding(asked: _Body, chain: KeyChain) -> None:
    if asked.input is None and asked.messages is not None:
        _chat(asked, chain)
    else:
        _prompts(chain, "input", asked.input)


def _prompts(chain: KeyChain, name: str, prompt: object) -> None:
    """Text, token ids, or an array of either: then one after the other."""
    if isinstance(prompt, str):
        chain.mark(Mark.TEXT)
        chain.text(prompt)
        chain.boundary()
        return
    if not isinstance(prompt, list):
        raise RefusedError(f"{name} is missing" if prompt is None else f"{name} is {_kind(prompt)}")
    if not prompt:
        raise RefusedError(f"{name} is empty: there is nothing to answer")
    if type(prompt[0]) is int:
        chain.mark(Mark.TOKENS)
        chain.raw(_token_bytes(name, prompt))
        chain.boundary()
        return
    for number, one in enumerate(prompt):
        if not isinstance(one, str | list):
            raise RefusedError(f"{name}[{number}] is {_kind(one)}: it must be text or token ids")
        if isinstance(one, list) and one and type(one[0]) is not int:
            raise RefusedError(f"{name}[{number}] is an array of {_kind(one[0])}: it must hold token ids")
        _prompts(chain, f"{name}[{number}]", one)


def _token_bytes(name: str, ids: list[Any]) -> bytes:
    try:
        if bool in set(map(type, ids)):
            raise TypeError
        return b"".join([number.to_bytes(4, "little") for number in ids])
    except (OverflowError, TypeError, AttributeError):
        raise RefusedError(f"{name} holds something that is no token id of 0 to {MAX_TOKEN_ID}") from None


def _response(asked: _Body, chain: KeyChain) -> None:
    instructions = _text("instructions", asked.instructions)
    if instructions is not None:
        _message(chain, "instructions", "system", {"content": instructions, "role": "system"})
    given = asked.input
    if isinstance(given, str):
        _message(chain, "input", "user", {"content": given, "role": "user"})
        return
    if not isinstance(given, list):
        raise RefusedError("input is missing" if given is None else f"input is {_kind(given)}")
    for number, item in enumerate(given):
        if not isinstance(item, dict):
            raise RefusedError(f"input[{number}] is {_kind(item)}: it must be an object")
        role = item.get("role")
        said = {field: value for field, value in item.items() if (field, value) != ("type", "message")}
        _message(chain, f"input[{number}]", role if isinstance(role, str) else "", said)


_BUILDERS: dict[str, Build] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/responses": _response,
    "/v1/embeddings": _embedding,
}

read = Reader().read
