"""The prompt of each kind of body, put into a chain of names. Pure."""

from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import xxhash

from kvferry.errors import RefusedError
from kvferry.router.bodies import Body, canonical_json, kind_of, text_of
from kvferry.router.keys import MAX_BOUNDARIES, KeyChain, Mark, escaped

MAX_TOKEN_ID = (1 << 32) - 1
_TEXT_PARTS = frozenset(("text", "input_text", "output_text"))
_WHOLE_BLOCKS = frozenset(("text", "image", "document"))

Build = Callable[[Body, KeyChain], None]


def _no_list(name: str, value: object) -> str:
    return f"{name} is missing" if value is None else f"{name} is {kind_of(value)}"


def _chat(asked: Body, chain: KeyChain) -> None:
    messages = asked.messages
    if not isinstance(messages, list):
        raise RefusedError(_no_list("messages", messages))
    if not messages:
        raise RefusedError("messages is empty: there is nothing to answer")
    unnamed = len(messages) - MAX_BOUNDARIES
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise RefusedError(f"messages[{number}] is {kind_of(message)}: it must be an object")
        role = message.get("role")
        if not isinstance(role, str):
            raise RefusedError(f"messages[{number}] has no role")
        content, named = message.get("content"), number >= unnamed
        if isinstance(content, str) and len(message) == 2:
            chain.message(escaped(role), escaped(content), named=named)
        else:
            _message(chain, f"messages[{number}]", role, message, named=named)


def _plain_chat(asked: Body, chain: KeyChain) -> None:
    messages = asked.messages
    if not messages:
        _chat(asked, chain)
        return
    unnamed = len(messages) - MAX_BOUNDARIES
    for number, message in enumerate(messages):
        role, content = bytes(message.get("role", b"")), bytes(message.get("content", b""))
        if role[:1] == content[:1] == b'"' and len(message) == 2:
            chain.message(role[1:-1], content[1:-1], named=number >= unnamed)
            continue
        said = {field: msgspec.json.decode(raw) for field, raw in message.items()}
        if not isinstance(said.get("role"), str):
            raise RefusedError(f"messages[{number}] has no role")
        _message(chain, f"messages[{number}]", said["role"], said, named=number >= unnamed)


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
        raise RefusedError(f"{name}.content is {kind_of(content)}: it must be text or an array of parts")
    if len(message) > 2 or content is None or "role" not in message:
        for field in sorted(message.keys() - {"role", "content"}):
            value = message[field]
            if value is not None and value != []:
                chain.mark(Mark.FIELD, field)
                chain.mark(Mark.VALUE)
                chain.raw(canonical_json(value))
    chain.boundary(named=named)


def _part(chain: KeyChain, part: object) -> None:
    """Text counts the same whether it is the whole content or a part of it."""
    if isinstance(part, str):
        chain.mark(Mark.TEXT)
        chain.text(part)
    elif isinstance(part, dict) and _is_text(part):
        chain.mark(Mark.TEXT)
        chain.text(part["text"])
    else:
        chain.media(xxhash.xxh3_128_digest(canonical_json(part)))


def _is_text(part: dict[str, object]) -> bool:
    kind = part.get("type")
    return isinstance(kind, str) and kind in _TEXT_PARTS and isinstance(part.get("text"), str)


def _completion(asked: Body, chain: KeyChain) -> None:
    _prompts(chain, "prompt", asked.prompt)


def _plain_completion(asked: Body, chain: KeyChain) -> None:
    prompt = bytes(asked.prompt)
    if prompt[:1] != b'"':
        _prompts(chain, "prompt", msgspec.json.decode(prompt) if prompt else None)
        return
    chain.mark(Mark.TEXT)
    chain.raw(prompt[1:-1])
    chain.boundary()


def _embedding(asked: Body, chain: KeyChain) -> None:
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
        raise RefusedError(_no_list(name, prompt))
    if not prompt:
        raise RefusedError(f"{name} is empty: there is nothing to answer")
    if type(prompt[0]) is int:
        chain.mark(Mark.TOKENS)
        chain.raw(_token_bytes(name, prompt))
        chain.boundary()
        return
    for number, one in enumerate(prompt):
        if not isinstance(one, str | list):
            raise RefusedError(f"{name}[{number}] is {kind_of(one)}: it must be text or token ids")
        if isinstance(one, list) and one and type(one[0]) is not int:
            raise RefusedError(f"{name}[{number}] is an array of {kind_of(one[0])}: it must hold token ids")
        _prompts(chain, f"{name}[{number}]", one)


def _token_bytes(name: str, ids: list[Any]) -> bytes:
    try:
        if bool in set(map(type, ids)):
            raise TypeError
        return array("I", ids).tobytes()
    except (OverflowError, TypeError, AttributeError):
        raise RefusedError(f"{name} holds something that is no token id of 0 to {MAX_TOKEN_ID}") from None


def _response(asked: Body, chain: KeyChain) -> None:
    instructions = text_of("instructions", asked.instructions)
    if instructions is not None:
        _message(chain, "instructions", "system", {"content": instructions, "role": "system"})
    given = asked.input
    if isinstance(given, str):
        _message(chain, "input", "user", {"content": given, "role": "user"})
        return
    if not isinstance(given, list):
        raise RefusedError(_no_list("input", given))
    for number, item in enumerate(given):
        if not isinstance(item, dict):
            raise RefusedError(f"input[{number}] is {kind_of(item)}: it must be an object")
        role = item.get("role")
        said = {field: value for field, value in item.items() if (field, value) != ("type", "message")}
        _message(chain, f"input[{number}]", role if isinstance(role, str) else "", said)


def _anthropic(asked: Body, chain: KeyChain) -> None:
    """A chat as Anthropic's API has it."""
    if asked.system is not None:
        _message(chain, "system", "system", {"role": "system", "content": whole_blocks(asked.system)})
    messages = asked.messages
    if not isinstance(messages, list):
        raise RefusedError(_no_list("messages", messages))
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str):
            raise RefusedError(f"messages[{number}] has no role")
        said = {"role": role, "content": whole_blocks(message.get("content"))}
        _message(chain, f"messages[{number}]", role, said)


def whole_blocks(content: object) -> object:
    """The parts of a message that are the same in every turn."""
    return list(_flat(content)) if isinstance(content, list) else content


def _flat(blocks: Iterable[object]) -> Iterator[object]:
    """Text and media as they are; what calls and thoughts say, as text; and what results hold.

    ``cache_control`` moves on with every turn, and is nothing that a prompt is made of.
    """
    for block in blocks:
        if not isinstance(block, dict):
            yield block
            continue
        said = {name: value for name, value in block.items() if name != "cache_control"}
        kind, inner = said.get("type"), said.get("content")
        if isinstance(kind, str) and kind in _WHOLE_BLOCKS:
            yield said
        elif isinstance(inner, list):
            yield canonical_json({**said, "content": None}).decode()
            yield from _flat(inner)
        else:
            yield canonical_json(said).decode()


BUILDERS: dict[str, Build] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/responses": _response,
    "/v1/messages": _anthropic,
    "/v1/embeddings": _embedding,
}
PLAIN_BUILDERS: dict[str, Build] = {
    "/v1/chat/completions": _plain_chat,
    "/v1/completions": _plain_completion,
}
KINDS: dict[Build, str] = {
    **{build: build.__name__ for build in BUILDERS.values()},
    **{build: BUILDERS[path].__name__ for path, build in PLAIN_BUILDERS.items()},
}
