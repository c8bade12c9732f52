"""Names of text learn which chunks they are."""

from hashlib import blake2b

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runs import runs

from kvferry.router.contract import Key
from kvferry.router.knowledge.links import Links, chunk_numbers

CHUNK = 10  # tokens


def prompt(text: str) -> tuple[tuple[Key, ...], bytes]:
    """Names at every 20 characters and at the end; chunks of 10 tokens, one character each."""

    def digest(upto: int) -> bytes:
        return blake2b(text[:upto].encode(), digest_size=32).digest()

    ends = sorted({*range(20, len(text) + 1, 20), len(text)})
    keys = tuple(Key(digest(end)[:16], end) for end in ends)
    return keys, b"".join(digest(end) for end in range(CHUNK, len(text) + 1, CHUNK))


def learn(links: Links, text: str, space: int = 0) -> None:
    keys, digests = prompt(text)
    links.learn(space, keys, digests, prompt_tokens=len(text), chunk_tokens=CHUNK)


def found(links: Links, text: str, space: int = 0) -> bytes | None:
    """The chunks of the longest known prefix."""
    longest = links.longest(space, prompt(text)[0])
    return None if longest is None else longest[1].digests


def test_a_prompt_that_was_told_is_known_to_its_end() -> None:
    links = Links()
    learn(links, "a" * 97)
    assert found(links, "a" * 97) == prompt("a" * 97)[1]
    assert found(links, "b" * 97) is None


def test_the_next_turn_knows_the_chunks_of_the_last() -> None:
    links = Links()
    learn(links, "a" * 100)
    assert found(links, "a" * 100 + "b" * 60) == prompt("a" * 100)[1]


def test_namespaces_are_told_apart() -> None:
    links = Links()
    learn(links, "a" * 100, space=1)
    assert found(links, "a" * 100, space=0) is None
    assert found(links, "a" * 100, space=1)


def test_two_prompts_that_part_show_how_far_a_name_goes() -> None:
    """Its tokens are denser at the end than was thought: the estimate by length was too long."""
    links = Links()
    shared = Key(b"s" * 16, 100)
    one, other = (
        (bytes([1]) * 32, bytes([2]) * 32, bytes([3]) * 32, bytes([4]) * 32),
        (bytes([1]) * 32, bytes([8]) * 32, bytes([9]) * 32, bytes([7]) * 32),
    )
    for name, digests in ((b"1" * 16, one), (b"2" * 16, other)):
        keys = (shared, Key(name, 133))
        links.learn(0, keys, b"".join(digests), prompt_tokens=40, chunk_tokens=10)
    longest = links.longest(0, (shared,))
    assert longest is not None
    assert longest[1].chunks == 1


def test_text_that_became_other_tokens_is_learned_anew() -> None:
    """As where the chat template says the day: from the first chunk on, all are others."""
    links = Links()
    keys, before = prompt("s" * 200 + "one")
    other_keys, _ = prompt("s" * 200 + "two")
    after = bytes(255 - byte for byte in before)
    links.learn(0, keys, before, prompt_tokens=203, chunk_tokens=CHUNK)
    for again in (other_keys, keys, other_keys):
        links.learn(0, again, after, prompt_tokens=203, chunk_tokens=CHUNK)
        for place in range(1, len(keys)):
            longest = links.longest(0, again[: place + 1])
            assert longest is not None
            assert longest[1].digests == after[: again[place].length // CHUNK * 32]


def test_the_end_of_a_whole_prompt_is_certain_whatever_was_estimated_before() -> None:
    links = Links()
    keys = (Key(b"a" * 16, 100), Key(b"b" * 16, 200))
    first, second = bytes([1]) * 32, bytes([2]) * 32
    links.learn(0, keys, first + second * 3, prompt_tokens=40, chunk_tokens=10)
    links.learn(0, keys[:1], first + bytes([3]) * 32, prompt_tokens=20, chunk_tokens=10)
    longest = links.longest(0, keys[:1])
    assert longest is not None
    assert longest[1].digests == first + bytes([3]) * 32


def test_what_is_known_is_bounded_by_names_and_by_bytes() -> None:
    links = Links(limit=50, limit_bytes=32 * 40)
    for number in range(300):
        learn(links, f"{number:04d}" * 30)
    assert len(links) <= 50
    assert links.digest_bytes <= 32 * 40
    links = Links(limit=10)
    for number in range(300):
        learn(links, f"{number:04d}" * 30)
    assert len(links) == 10
    assert links.digest_bytes == sum(
        {id(p): len(p.digests) for p in (l.prompt for l in links._links.values())}.values()
    )


def test_chunks_are_numbered_by_the_heads_of_their_digests() -> None:
    digests = bytes(range(96))
    assert list(chunk_numbers(digests)) == [
        int.from_bytes(digests[at : at + 8], "little") for at in (0, 32, 64)
    ]
    assert list(chunk_numbers(b"")) == []
    assert list(chunk_numbers(digests[:70])) == list(chunk_numbers(digests))[:2]


@settings(max_examples=runs(60), deadline=None)
@given(texts=st.lists(st.text("ab", min_size=1, max_size=120), min_size=1, max_size=12))
def test_no_prefix_is_taken_for_chunks_it_does_not_have(texts: list[str]) -> None:
    """Tokens and characters are one here, so that every estimate is exact."""
    links = Links()
    for text in texts:
        learn(links, text)
        for other in texts:
            known = found(links, other)
            assert known is None or prompt(other)[1].startswith(known)
        assert found(links, text) == prompt(text)[1]
