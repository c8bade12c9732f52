"""The fields of a request's body that the choice of a worker needs, decoded. Pure."""

from typing import Any

import msgspec

from kvferry.errors import RefusedError

ABSENT = msgspec.Raw()
_CANONICAL = msgspec.json.Encoder(order="sorted")


class Body(msgspec.Struct):
    """Of all paths together. Raw: changes the whole prompt, and is only compared."""

    model: Any = None
    messages: Any = None
    prompt: Any = None
    input: Any = None
    instructions: Any = None
    system: Any = None
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
    tools: msgspec.Raw = ABSENT
    functions: msgspec.Raw = ABSENT
    response_format: msgspec.Raw = ABSENT
    text: msgspec.Raw = ABSENT
    reasoning: msgspec.Raw = ABSENT
    reasoning_effort: msgspec.Raw = ABSENT
    thinking: msgspec.Raw = ABSENT
    output_config: msgspec.Raw = ABSENT
    chat_template: msgspec.Raw = ABSENT
    chat_template_kwargs: msgspec.Raw = ABSENT
    documents: msgspec.Raw = ABSENT
    mm_processor_kwargs: msgspec.Raw = ABSENT
    add_special_tokens: msgspec.Raw = ABSENT
    truncate_prompt_tokens: msgspec.Raw = ABSENT
    previous_response_id: msgspec.Raw = ABSENT
    conversation: msgspec.Raw = ABSENT
    lora_path: msgspec.Raw = ABSENT


class PlainBody(Body):
    """Of a plain body: what prompts are made of stays as it was written."""

    messages: list[dict[str, msgspec.Raw]] | None = None
    prompt: msgspec.Raw = ABSENT
    cache_salt: Any = msgspec.UNSET


BODY = msgspec.json.Decoder(Body)
PLAIN_BODY = msgspec.json.Decoder(PlainBody)


def text_of(name: str, value: object) -> str | None:
    """Of a field that is text, if it is there. Raises RefusedError."""
    if value is None or isinstance(value, str):
        return value
    raise RefusedError(f"{name} is {kind_of(value)}: it must be text")


def kind_of(value: object) -> str:
    """As JSON calls it."""
    names = {dict: "an object", list: "an array", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "text" if isinstance(value, str) else "null")


def canonical_json(value: object) -> bytes:
    """The same for equal values, whatever their keys' order was."""
    return _CANONICAL.encode(value)
