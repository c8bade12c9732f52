"""Finds what waits for a part by the part's key, whatever its size is said to be. Pure."""

from collections.abc import Iterable

from kvferry.identity.names import PartKey, PartRef


class ByKey:
    """A set of references; nearly always there is one of a key, and that one costs no container."""

    def __init__(self) -> None:
        self._found: dict[PartKey, PartRef | dict[PartRef, None]] = {}

    def add(self, ref: PartRef) -> None:
        """Idempotent."""
        known = self._found.setdefault(ref.key, ref)
        if isinstance(known, dict):
            known[ref] = None
        elif known != ref:
            self._found[ref.key] = {known: None, ref: None}

    def discard(self, ref: PartRef) -> None:
        """Idempotent."""
        known = self._found.get(ref.key)
        if isinstance(known, dict):
            known.pop(ref, None)
            if not known:
                del self._found[ref.key]
        elif known == ref:
            del self._found[ref.key]

    def of(self, keys: Iterable[PartKey]) -> list[PartRef]:
        """Those with one of these keys."""
        found: list[PartRef] = []
        for key in keys:
            known = self._found.get(key)
            if isinstance(known, dict):
                found += known
            elif known is not None:
                found.append(known)
        return found
