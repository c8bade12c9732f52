"""Looks at an engine's KV memory from inside its worker, apart from everything kvferry does.

vLLM mixes this class into its worker (``--worker-extension-cls``) and calls it by name. It is how the
demo proves that a replica's memory holds, bit for bit, what another replica computed: neither the
connector nor the node takes part in the comparison. For demonstrations and benchmarks only.
"""

from typing import Any

import xxhash


class KvProbe:
    """Methods become methods of the worker; names are prefixed so that they collide with nothing."""

    def kvferry_block_digests(self) -> dict[str, list[str]]:
        """One digest per KV block that is not all zeros, over every layer's bytes of that block.

        Order is the block number's, which means nothing to a caller: compare as sets.
        """
        layers = [_block_rows(cache) for cache in _kv_caches(self)]
        first = layers[0]
        digests = []
        for block in range(first.shape[0]):
            if not first[block].any():
                continue
            state = xxhash.xxh3_128()
            for layer in layers:
                state.update(memoryview(layer[block].numpy()))
            digests.append(state.hexdigest())
        return {"digests": digests}

    def kvferry_scrub(self) -> dict[str, int]:
        """Overwrite every block with zeros. Only while idle and after the prefix cache was reset."""
        scrubbed = 0
        for cache in _kv_caches(self):
            scrubbed += cache.untyped_storage().nbytes()
            cache.zero_()
        return {"bytes": scrubbed}


def _kv_caches(worker: Any) -> list[Any]:
    """The layers' cache tensors of a worker; only CPU tensors are supported."""
    caches: list[Any] = list(worker.model_runner.kv_caches)
    return caches


def _block_rows(cache: Any) -> Any:
    """A layer's cache as (blocks, bytes per block)."""
    import torch

    return cache.view(torch.uint8).reshape(cache.shape[0], -1)
