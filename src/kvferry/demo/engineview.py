"""Figures read off an engine's Prometheus page."""

import re

from kvferry.errors import RefusedError

_BLOCK_SIZE = re.compile(r'^vllm:cache_config_info\{.*?block_size="(\d+)"', re.MULTILINE)


def block_tokens_of(page: str) -> int:
    """Tokens per KV block. Raises RefusedError when the page does not tell."""
    match = _BLOCK_SIZE.search(page)
    if match is None:
        raise RefusedError("the engine's metrics do not tell its block size (vllm:cache_config_info)")
    return int(match[1])


def counter_of(page: str, name: str) -> float:
    """Sum of a counter's samples over all labels; 0.0 when it is not there."""
    sample = re.compile(rf"^{re.escape(name)}(?:_total)?(?:\{{[^}}]*\}})? ([0-9.eE+-]+)$", re.MULTILINE)
    return sum(float(value) for value in sample.findall(page))
