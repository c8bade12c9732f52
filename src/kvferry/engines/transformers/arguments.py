"""What callers give, checked: each mistake is one clear error before anything else happens."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import Cache

from kvferry.errors import MisconfiguredError, RefusedError


def check_options(
    *, socket: Any, pool: Any, valkey: Any, chunk_tokens: Any, model_name: Any, domain: Any
) -> None:
    """Raises MisconfiguredError, one line."""
    if pool is not None and socket is not None:
        raise MisconfiguredError("give a socket (of a node) or a pool (in this process), not both")
    if valkey is not None and pool is None:
        raise MisconfiguredError("valkey needs a pool in this process; a node has its own Valkey")
    if socket is not None and (not isinstance(socket, str | os.PathLike) or not str(socket)):
        raise MisconfiguredError(
            f"socket={socket!r} is no path: give that of a node's socket, or leave it out"
        )
    if chunk_tokens is not None and (not isinstance(chunk_tokens, int) or isinstance(chunk_tokens, bool)):
        raise MisconfiguredError(
            f"chunk_tokens={chunk_tokens!r} is no whole number: give one like 128, or leave it out"
        )
    for name, text in (("model_name", model_name), ("domain", domain)):
        if text is not None and not isinstance(text, str):
            raise MisconfiguredError(f"{name}={text!r} is no text: give one, or leave it out")


def token_ids_of(input_ids: Any) -> list[int]:
    """Of one sequence: a tensor or list, [tokens] or [1, tokens]. Raises RefusedError."""
    if isinstance(input_ids, Mapping):
        raise RefusedError(
            f'a {type(input_ids).__name__} holds more than token ids: pass its ["input_ids"], and its '
            '["attention_mask"] as attention_mask'
        )
    try:
        tensor = torch.as_tensor(input_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RefusedError(f"token ids must be one sequence of integers: {error}") from error
    if tensor.dim() == 2 and tensor.shape[0] != 1:
        raise RefusedError(
            f"{tensor.shape[0]} sequences: give one; for several with one prefix, load that and call "
            "batch_repeat_interleave on the cache"
        )
    if tensor.dim() not in (1, 2) or tensor.is_floating_point():
        raise RefusedError(f"token ids have the shape {tuple(tensor.shape)}, type {tensor.dtype}")
    ids: list[int] = tensor.reshape(-1).tolist()
    return ids


def has_holes(attention_mask: Any, *, at_least: int, at_most: int) -> bool:
    """Whether a mask hides a token. Its tokens are at_least .. at_most; RefusedError for another shape."""
    if attention_mask is None:
        return False
    try:
        mask = torch.as_tensor(attention_mask)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RefusedError(f"attention_mask must be a tensor or list of ones and zeros: {error}") from error
    row = mask.dim() == 1 or (mask.dim() == 2 and mask.shape[0] == 1)
    if not row or not at_least <= mask.shape[-1] <= at_most:
        raise RefusedError(
            f"attention_mask has the shape {tuple(mask.shape)}: give that of the prompt, [{at_most}] or "
            f"[1, {at_most}]"
        )
    return not bool(mask.all())


def check_cap(tokens: Any) -> None:
    """RefusedError for what is no number of tokens."""
    if tokens is not None and (type(tokens) is not int or tokens < 0):
        raise RefusedError(f"max_load_tokens={tokens!r}: give a whole number from 0 up, or leave it out")


def check_cache(cache: Any) -> None:
    """RefusedError for what is no cache of transformers."""
    if not isinstance(cache, Cache):
        raise RefusedError(
            f"a {type(cache).__name__} is no cache: save what load() returned, after the model has used it"
        )
