"""For which prompt a cache was loaded, so that it is not stored under another's tokens."""

import threading
import weakref
from array import array
from collections.abc import Sequence
from typing import Any

from kvferry.errors import RefusedError


class Origins:
    """The prompts of the caches that ``load`` gave out, as long as somebody holds them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prompts: weakref.WeakKeyDictionary[Any, array[int]] = weakref.WeakKeyDictionary()

    def remember(self, cache: Any, token_ids: Sequence[int]) -> None:
        """A cache that is filled anew has its last prompt."""
        with self._lock:
            self._prompts[cache] = array("q", token_ids)

    def check(self, cache: Any, token_ids: Sequence[int]) -> None:
        """RefusedError for ids that do not begin with the cache's prompt, or are no beginning of it."""
        with self._lock:
            prompt = self._prompts.get(cache)
        if prompt is None:
            return
        for place, (ours, given) in enumerate(zip(prompt, token_ids, strict=False)):
            if ours != given:
                raise RefusedError(
                    f"the cache was loaded for a prompt whose token {place} is {ours}, in the ids to save it "
                    f"is {given}: save a cache with the ids it was computed from"
                )
