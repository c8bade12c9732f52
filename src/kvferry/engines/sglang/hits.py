"""How far a prefix can be restored from several pools of pages. Pure.

A pool of kind ALL holds a page for every page of the prefix. One of kind TRAILING holds states or windows:
a prefix of p pages needs its last n pages there (fewer where the prefix is shorter), so p may be possible
where p - 1 is not.
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_QUESTIONS = 64  # per query; what lies deeper is not offered


class Policy(enum.Enum):
    """What a prefix needs of a pool."""

    ALL = "all"
    TRAILING = "trailing"


@dataclass(frozen=True, slots=True)
class SidePool:
    """A pool beside the main one.

    longest: the longest prefix of at most so many pages that this pool by itself could restore.
    """

    name: str
    policy: Policy
    longest: Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Hit:
    """pages: restorable from all pools. boundaries: every length that is, ascending, as far as was asked.

    by_pool: what each pool would allow by itself; a pool that allows nothing is left out.
    """

    pages: int
    boundaries: tuple[int, ...]
    by_pool: dict[str, int]


def fold(main: str, main_pages: int, others: Sequence[SidePool], *, boundaries: int) -> Hit:
    """What all pools agree on.

    main_pages: leading pages of the main pool. boundaries: so many lengths are wanted, the longest first; one
    is enough for an engine of one rank, several ranks choose among those that all of them have.
    """
    by_pool = {main: main_pages} if main_pages else {}
    limit = main_pages
    for pool in others:
        if limit and pool.policy is Policy.ALL:
            reach = pool.longest(main_pages)
            if reach:
                by_pool[pool.name] = reach
            limit = min(limit, reach)
    trailing = [pool for pool in others if pool.policy is Policy.TRAILING]
    if not limit or not trailing:
        return Hit(limit, tuple(range(1, limit + 1)), by_pool)
    found = _common(limit, trailing, by_pool, boundaries)
    return Hit(found[0] if found else 0, tuple(reversed(found)), by_pool)


def _common(limit: int, pools: Sequence[SidePool], by_pool: dict[str, int], wanted: int) -> list[int]:
    """Lengths that every one of these pools allows, the longest first."""
    found: list[int] = []
    questions = 0
    while limit and len(found) < wanted and questions < MAX_QUESTIONS:
        allowed = limit
        for pool in pools:
            if allowed:
                allowed = pool.longest(allowed)
                questions += 1
                if allowed:
                    by_pool.setdefault(pool.name, allowed)
        if allowed == limit:
            found.append(allowed)
            limit -= 1
        else:
            limit = allowed
    return found
