"""Damaged inputs from good ones, the same for the same seed."""

import random
from collections.abc import Callable, Sequence

# What length fields, counts and texts go wrong with.
NUMBERS = (
    b"\x00",
    b"\x7f",
    b"\xff",
    b"\x00\x00\x00\x80",
    b"\xff\xff\xff\xff",
    b"\xc1",
    b"\xdd\xff\xff\xff\xff",
)
WORDS = (
    b"-1",
    b"0",
    b"99999999999999999999",
    b"4294967296",
    b"1e999",
    b"nan",
    b"\r\n",
    b"\n",
    b"\0",
    b"*",
    b"$",
    b"-",
    b":",
    b"[",
    b"{",
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    "\u2028é".encode(),
    b"@",
    b"%00",
    b"?",
    b"#",
    b"//",
)


def mutate(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """One of the seeds, mostly with one to four kinds of damage."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3, 4))):
        _DAMAGES[rng.randrange(len(_DAMAGES))](rng, data, seeds)
    return bytes(data)


def _place(rng: random.Random, data: bytearray) -> int:
    return rng.randrange(len(data) + 1)


def _flip(rng: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _byte(rng: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.randrange(256)


def _cut(rng: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    del data[_place(rng, data) :]


def _remove(rng: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    at = _place(rng, data)
    del data[at : at + rng.randrange(1, 9)]


def _repeat(rng: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    at = _place(rng, data)
    data[at:at] = data[at : at + rng.randrange(1, 17)] * rng.choice((1, 2, 50))


def _number(rng: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    value, at = rng.choice(NUMBERS), _place(rng, data)
    data[at : at + len(value)] = value


def _word(rng: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    value, at = rng.choice(WORDS), _place(rng, data)
    data[at : at + rng.choice((0, len(value)))] = value


def _splice(rng: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    other = rng.choice(seeds)
    data[_place(rng, data) :] = other[rng.randrange(len(other) + 1) :]


def _noise(rng: random.Random, data: bytearray, seeds: Sequence[bytes]) -> None:
    at = _place(rng, data)
    data[at:at] = rng.randbytes(rng.randrange(1, 33))


_DAMAGES: tuple[Callable[[random.Random, bytearray, Sequence[bytes]], None], ...] = (
    _flip,
    _flip,
    _byte,
    _cut,
    _remove,
    _repeat,
    _number,
    _word,
    _word,
    _splice,
    _noise,
)
