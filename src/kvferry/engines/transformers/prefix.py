"""The prefix cache of one model: match, load into a ``Cache``, save from one."""

import contextlib
import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from transformers.cache_utils import Cache, StaticCache

from kvferry.client.messages import NamespaceInfo
from kvferry.client.store import PrefixStore, StoreStatistics
from kvferry.config import client_group, client_token, default_socket_path
from kvferry.engines.settings import DEFAULT_DOMAIN
from kvferry.engines.transformers import states
from kvferry.engines.transformers.arguments import (
    check_cache,
    check_cap,
    check_options,
    has_holes,
    token_ids_of,
)
from kvferry.engines.transformers.form import form_of
from kvferry.engines.transformers.identity import (
    attention_of,
    check_supported,
    config_of,
    measure_layout,
    namespace_spec,
    other_token_ids,
)
from kvferry.engines.transformers.origins import Origins
from kvferry.engines.transformers.transfer import Loaded, Stored
from kvferry.engines.transformers.weights import WeightsWatch
from kvferry.identity.chunks import ChunkChain, Extras
from kvferry.identity.domain import DomainKey
from kvferry.identity.namespace import fingerprint
from kvferry.local import LocalNode

LOCAL_WAIT_S = 10.0
CHANGED_WEIGHTS = "changed weights"
SAY_CHANGED_WEIGHTS = "the model's weights have changed since: make a new PrefixCache"
ANSWER_S = 1.0  # a prompt that is computed takes longer than most answers

log = logging.getLogger("kvferry.transformers")


@dataclass(frozen=True, slots=True)
class PrefixStatistics:
    """Since start. prompts: calls of ``load``; hits: of them, those that found something.

    prompt_tokens, loaded_tokens: of all of them. refused: calls that took no part, or only some, by why.
    store: of the client, with what was saved and why loads and saves ended.
    """

    prompts: int
    hits: int
    prompt_tokens: int
    loaded_tokens: int
    refused: dict[str, int]
    store: StoreStatistics


class PrefixCache:
    """Finds, loads and saves prefixes of one model. Threads may share it; it ends with ``close``, or unused.

    A prefix is used up to the last whole chunk before the prompt's last token, which the model computes.
    """

    def __init__(
        self,
        model: Any,
        *,
        socket: Path | str | None = None,
        pool: str | int | None = None,
        valkey: str | None = None,
        chunk_tokens: int | None = None,
        domain: str = DEFAULT_DOMAIN,
        domain_key_file: Path | str | None = None,
        token_file: Path | None = None,
        model_name: str | None = None,
    ) -> None:
        """Runs the model on two tokens, and reads its weights in part.

        socket: of this host's node; None takes $KVFERRY_SOCKET or where nodes are by default. Nobody has to
        be there. pool: instead, a pool of so many bytes ("2GiB") in this process; valkey: the URL of what
        lies behind that one. chunk_tokens: None takes 128 on a CPU and 256 elsewhere. domain,
        domain_key_file: the trust domain and its key. token_file: what the node asks for. model_name: None
        takes the model's class.

        Raises MisconfiguredError, one line, for a model that is not supported.
        """
        check_options(
            socket=socket,
            pool=pool,
            valkey=valkey,
            chunk_tokens=chunk_tokens,
            model_name=model_name,
            domain=domain,
        )
        check_supported(model)
        self._model = model
        self._other_ids = other_token_ids(model.config)
        self._layout = measure_layout(model, chunk_tokens=chunk_tokens)
        # Before they are digested: a change in between is noticed too.
        self._weights, self._attention = WeightsWatch(model), attention_of(model)
        self._form = config_of(model), form_of(model)
        self._key = DomainKey.load(domain, key_file=domain_key_file)
        spec = namespace_spec(model, self._layout, domain=domain, key=self._key, model_name=model_name)
        geometry = self._layout.geometry
        self._namespace = NamespaceInfo(
            namespace=fingerprint(spec),
            part_bytes=geometry.part_bytes,
            chunk_tokens=geometry.chunk_tokens,
            domain=domain,
            label=f"{spec.model} {spec.kv_dtype} transformers",
            trailing=geometry.trailing,
        )
        self._lock = threading.Lock()
        self._prompts = self._hits = self._prompt_tokens = self._loaded_tokens = 0
        self._refused: Counter[str] = Counter()
        self._origins = Origins()
        with contextlib.ExitStack() as undo:
            if pool is not None:
                local = LocalNode(pool=pool, valkey=valkey)
                undo.callback(local.close)
                socket = local.socket_path
            self._store = PrefixStore(
                socket_path=socket or default_socket_path(),
                engine=f"transformers:{spec.model}:{os.getpid()}",
                namespace=self._namespace,
                token="" if pool is not None else client_token(token_file),
                group=None if pool is not None else client_group(),
                answer_s=ANSWER_S,
            )
            undo.callback(self._store.close)
            if pool is not None:
                self._store.wait_connected(LOCAL_WAIT_S)
            # A notebook's cell that is run again drops the one before; a process that ends waits for Valkey.
            self._end = weakref.finalize(self, undo.pop_all().close)

    @property
    def chunk_tokens(self) -> int:
        """Prefixes are shared in steps of so many tokens."""
        return self._layout.chunk_tokens

    def match(self, input_ids: Any, *, salt: str | None = None) -> int:
        """How many leading tokens of a prompt ``load`` would bring now."""
        token_ids = token_ids_of(input_ids)
        if self._takes_no_part(token_ids):
            return 0
        return self._store.match(self._digests(token_ids[:-1], salt)) * self.chunk_tokens

    def load(
        self,
        input_ids: Any,
        *,
        into: StaticCache | None = None,
        attention_mask: Any = None,
        salt: str | None = None,
        max_load_tokens: int | None = None,
    ) -> Cache:
        """What to give to ``generate`` as past_key_values: the longest prefix found, or an empty cache.

        input_ids: one sequence, [tokens] or [1, tokens]. into: an unused StaticCache to fill, instead of a
        new DynamicCache. attention_mask: of the prompt; one with holes is not served. salt: keeps prefixes
        apart that have different ones, as those of different users. max_load_tokens: at most so many are
        loaded, in whole chunks; 0 loads nothing.

        A lost node costs an empty cache. Raises RefusedError for arguments that cannot be used.
        """
        token_ids = token_ids_of(input_ids)
        check_cap(max_load_tokens)
        cache = states.empty_cache(self._model.config) if into is None else states.unused(into)
        tokens = 0
        holes = has_holes(attention_mask, at_least=len(token_ids), at_most=len(token_ids))
        self._origins.remember(cache, token_ids)
        if not (self._takes_no_part(token_ids) or self._is_padded(holes)):
            most = min(len(token_ids), states.room(cache)) - 1
            if max_load_tokens is not None:
                most = min(most, max_load_tokens)
            with torch.no_grad():
                tokens = self._fill(cache, self._digests(token_ids[: max(0, most)], salt))
        with self._lock:
            self._prompts += 1
            self._hits += tokens > 0
            self._prompt_tokens += len(token_ids)
            self._loaded_tokens += tokens
        return cache

    def _fill(self, cache: Cache, digests: Sequence[bytes]) -> int:
        """How many tokens were found and are in the cache now."""
        count = self._store.match(digests) if digests else 0
        if not count:
            return 0
        loaded = Loaded(self._layout, chunks=count)
        chunks = self._store.load(digests[:count], loaded.take)
        if chunks:
            states.fill(cache, loaded.layers(chunks), chunks * self.chunk_tokens)
        return chunks * self.chunk_tokens

    def save(
        self, input_ids: Any, cache: Cache, *, attention_mask: Any = None, salt: str | None = None
    ) -> int:
        """Store the whole chunks of what ``cache`` holds; how many leading tokens can be loaded now.

        input_ids: one sequence, the prompt or what ``generate`` returned; the cache must be of that sequence,
        and one that ``load`` made is refused under other tokens. attention_mask: of its beginning.
        What sliding-window layers have dropped cannot be stored; ``load`` makes caches that keep it.

        A lost or full node stores less. Raises RefusedError for arguments that cannot be used.
        """
        token_ids = token_ids_of(input_ids)
        check_cache(cache)
        self._origins.check(cache, token_ids)
        holes = has_holes(attention_mask, at_least=0, at_most=len(token_ids))
        if self._takes_no_part(token_ids) or self._is_padded(holes) or self._is_not_what_it_was():
            return 0
        tokens = min(len(token_ids), states.length(cache))
        digests = self._digests(token_ids[:tokens], salt)
        if not digests:
            return 0
        stored = Stored(self._layout, states.spans(cache, self._layout))
        with torch.no_grad():
            self._store.save([], digests, stored.fill, has=stored.has)
        chunks = self._store.match(digests)
        if chunks < len(digests) and stored.lacks(range(chunks, len(digests))) and self._store.connected:
            self._refuse("windows dropped", "sliding windows have dropped tokens: use a cache from load()")
        return chunks * self.chunk_tokens

    def statistics(self) -> PrefixStatistics:
        """A snapshot."""
        with self._lock:
            return PrefixStatistics(
                prompts=self._prompts,
                hits=self._hits,
                prompt_tokens=self._prompt_tokens,
                loaded_tokens=self._loaded_tokens,
                refused=dict(self._refused),
                store=self._store.statistics(),
            )

    def close(self) -> None:
        """Idempotent. Ends a pool in this process, and what only that pool holds."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _digests(self, token_ids: Sequence[int], salt: str | None) -> list[bytes]:
        chain = ChunkChain(
            self._key,
            self._namespace.namespace,
            chunk_tokens=self.chunk_tokens,
            extras=Extras(cache_salt=salt),
        )
        return chain.extend(token_ids)

    def _takes_no_part(self, token_ids: Sequence[int]) -> bool:
        """Whether the tokens do not name the KV of this prompt."""
        if self._model.training:
            return self._refuse("training mode", "the model is in training mode: call model.eval()")
        if torch.is_autocast_enabled(self._layout.device.type):
            return self._refuse("autocast", "under autocast prompts are computed")
        if self._weights.changed():
            return self._refuse(CHANGED_WEIGHTS, SAY_CHANGED_WEIGHTS)
        if attention_of(self._model) != self._attention:
            return self._refuse(
                "changed attention", "the model's attention has changed since: make a new PrefixCache"
            )
        if (config_of(self._model), form_of(self._model)) != self._form:
            return self._refuse(
                "changed model",
                "the model's modules, constants or configuration have changed since: make a new PrefixCache",
            )
        if not self._other_ids.isdisjoint(token_ids):
            return self._refuse("not only text", "prompts that are not only text are computed")
        return False

    def _is_not_what_it_was(self) -> bool:
        return self._weights.changed_between() and self._refuse(CHANGED_WEIGHTS, SAY_CHANGED_WEIGHTS)

    def _is_padded(self, holes: bool) -> bool:
        return holes and self._refuse(
            "padding", "prompts with padding, or holes in their attention mask, are computed"
        )

    def _refuse(self, why: str, message: str) -> bool:
        with self._lock:
            first = why not in self._refused
            self._refused[why] += 1
        if first:
            log.warning("kvferry: %s", message)
        return True
