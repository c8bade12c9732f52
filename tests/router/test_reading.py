"""Bodies become names of prefixes: equal for equal prompts however they are written, and only then."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runs import runs

from kvferry.errors import RefusedError
from kvferry.router.contract import Key
from kvferry.router.keys import CUTS, MAX_BOUNDARIES, MAX_KEYS, MEDIA_LENGTH
from kvferry.router.reading import Reader

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
READER = Reader(seed=7)


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


def chat(*messages: tuple[str, Any], **fields: Any) -> tuple[Key, ...]:
    said = [{"role": role, "content": content} for role, content in messages]
    return READER.read(CHAT, body(messages=said, **fields)).keys


def names(keys: tuple[Key, ...]) -> set[bytes]:
    return {key.name for key in keys}


def shared(one: tuple[Key, ...], other: tuple[Key, ...]) -> int:
    """Length of the longest common prefix that both name."""
    common = names(one) & names(other)
    return max((key.length for key in one if key.name in common), default=0)


def test_a_known_prompt_has_the_names_it_always_had() -> None:
    keys = Reader(seed=1).read(CHAT, body(messages=[{"role": "user", "content": "Hello"}])).keys
    assert [(key.name.hex(), key.length) for key in keys] == [("e2748049d9a3b09f553fb4ff6a91e2a0", 15)]


@given(
    st.lists(st.tuples(st.sampled_from(["user", "system"]), st.text(max_size=3000)), min_size=1, max_size=4),
    st.booleans(),
)
@settings(deadline=None, max_examples=runs(60))
def test_a_body_has_the_same_names_read_as_it_was_written_or_as_a_whole(
    messages: list[tuple[str, str]], as_parts: bool
) -> None:
    """Whatever is escaped in it without need, and whether it is a salt's that has to be looked for."""
    said: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in messages]
    if as_parts:
        said.append({"role": "user", "content": [{"type": "text", "text": "x"}], "name": "n"})
    ways = [
        json.dumps({"model": "m", "messages": said}).encode(),
        json.dumps({"model": "m", "messages": said}, ensure_ascii=False).encode(),
        json.dumps({"messages": said, "model": "m", "user\\u": "\u00e9"}, indent=1).encode(),
        json.dumps({"messages": said, "model": "m", "cache_salt": None}, ensure_ascii=False).encode(),
    ]
    found = [READER.read(CHAT, way, with_opening=True) for way in ways]
    assert [one.keys for one in found] == [found[0].keys] * len(ways)
    assert [one.opening for one in found] == [found[0].opening] * len(ways)
    prompts = [
        json.dumps({"model": "m", "prompt": messages[0][1]}, ensure_ascii=ascii_only).encode()
        for ascii_only in (True, False)
    ]
    assert READER.read(TEXT, prompts[0]).keys == READER.read(TEXT, prompts[1]).keys


def test_what_is_no_text_in_a_plain_body_is_left_to_the_worker() -> None:
    """It refuses such a body; to look for it here would take as long as all the rest."""
    assert READER.read(CHAT, b'{"messages": [{"role": "user", "content": "\xff"}]}').keys


def test_the_next_turn_names_the_whole_conversation_before_it() -> None:
    before = chat(("system", "Be brief."), ("user", "Hi"))
    after = chat(("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "More"))
    assert after[: len(before)] == before


@pytest.mark.parametrize(
    "wanted", [{"prompt_logprobs": 0}, {"echo": True, "logprobs": 1}, {"echo": True, "top_logprobs": 2}]
)
def test_a_prompt_that_is_computed_whatever_is_cached_has_a_name_of_its_own(wanted: dict[str, Any]) -> None:
    """Else its misses would be taken for those of an empty cache."""
    plain, one, other = chat(("user", "x" * 9000)), *(chat(("user", "x" * 9000), **wanted) for _ in "ab")
    assert not names(plain) & names(one)
    assert not names(one) & names(other)
    assert [key.length for key in one] == [plain[-1].length]
    assert chat(("user", "x" * 9000), echo=False, logprobs=True, top_logprobs=3) == plain


def test_another_question_about_one_document_shares_the_document() -> None:
    document = "".join(f"line {number}\n" for number in range(20_000))
    one, other = chat(("user", document + "What?")), chat(("user", document + "Why, then?"))
    length = len(json.dumps(document))
    assert length - 4096 <= shared(one, other) <= length + 16
    assert one[-1].name != other[-1].name


def test_prefixes_inside_a_text_end_at_places_that_do_not_depend_on_what_follows() -> None:
    text = "x" * 300_000
    short, long = chat(("user", text[:200_000])), chat(("user", text))
    assert set(short[:-1]) <= set(long)


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "other"},
        {"cache_salt": "a"},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"functions": [{"name": "f"}]},
        {"response_format": {"type": "json_object"}},
        {"chat_template": "{{ x }}"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"documents": [{"text": "d"}]},
        {"reasoning_effort": "low"},
        {"add_special_tokens": True},
        {"mm_processor_kwargs": {"x": 1}},
        {"tool_choice": "none"},
        {"lora_path": "a"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_changes_the_whole_prompt_changes_every_name(changed: dict[str, Any]) -> None:
    said = [{"role": "user", "content": "x" * 2000}]
    plain = READER.read(CHAT, body(messages=said)).keys
    other = READER.read(
        CHAT,
        body(messages=said, **changed)
        if "model" not in changed
        else body(messages=said).replace(b'"m"', b'"other"'),
    ).keys
    assert len(plain) > 1
    assert not names(plain) & names(other)


@pytest.mark.parametrize(
    "changed",
    [
        {"temperature": 0.3},
        {"max_tokens": 5},
        {"stream": True},
        {"tools": []},
        {"tools": None},
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"tool_choice": "auto"},
        {"user": "u"},
    ],
    ids=str,
)
def test_what_does_not_change_the_prompt_changes_no_name(changed: dict[str, Any]) -> None:
    assert chat(("user", "Hi"), **changed) == chat(("user", "Hi"))


def test_the_routers_salt_and_the_callers_are_in_the_names() -> None:
    said = body(messages=[{"role": "user", "content": "Hi"}], cache_salt="own")
    kept = READER.read(CHAT, said, "s")
    assert kept.own_salt == "own"
    others = [
        READER.read(CHAT, said, "t"),
        READER.read(CHAT, said),
        READER.read(CHAT, said, "s", ignore_own_salt=True),
    ]
    assert len({kept.keys, *(other.keys for other in others)}) == 4
    without = body(messages=[{"role": "user", "content": "Hi"}])
    assert READER.read(CHAT, without, "s").keys == others[2].keys


def test_a_text_part_is_as_good_as_text_and_an_image_counts_by_its_content() -> None:
    assert chat(("user", [{"type": "text", "text": "Hi"}])) == chat(("user", "Hi"))
    assert chat(("user", None)) != chat(("user", ""))

    def with_image(url: str) -> tuple[Key, ...]:
        return chat(
            ("user", [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}])
        )

    assert with_image("data:image/png;base64,AA==") == with_image("data:image/png;base64,AA==")
    assert not names(with_image("data:image/png;base64,AA==")) & names(
        with_image("data:image/png;base64,AB==")
    )
    assert with_image("data:,x")[-1].length > MEDIA_LENGTH
    assert with_image("data:," + "x" * 500_000)[-1].length == with_image("data:,x")[-1].length


def test_token_ids_are_a_prompt_too() -> None:
    ids = list(range(5000))
    one = READER.read(TEXT, body(prompt=ids)).keys
    other = READER.read(TEXT, body(prompt=[*ids[:4000], 9, *ids[4001:]])).keys
    assert 14_000 < shared(one, other) <= 16_010
    assert one[-1].length == pytest.approx(20_000, abs=10)


def test_several_prompts_begin_with_the_first() -> None:
    several = READER.read(TEXT, body(prompt=["One", "Two"])).keys
    assert several[0] == READER.read(TEXT, body(prompt="One")).keys[0]
    assert len(several) == 2
    assert several != READER.read(TEXT, body(prompt=["One", "Three"])).keys
    assert (
        READER.read(TEXT, body(prompt=[[1, 2], [3]])).keys
        != READER.read(TEXT, body(prompt=[[1], [2, 3]])).keys
    )


def test_a_response_is_read_like_a_chat() -> None:
    def response(**fields: Any) -> tuple[Key, ...]:
        return READER.read("/v1/responses", body(**fields)).keys

    assert response(input="Hi") == response(input=[{"role": "user", "content": "Hi"}])
    assert response(input="Hi") == response(
        input=[{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
    )
    assert response(instructions="Be brief.", input="Hi") != response(input="Hi")
    assert response(previous_response_id="resp_1", input="Hi") != response(input="Hi")
    call = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}
    assert response(input=[call]) != response(input=[{**call, "arguments": "{1}"}])


def test_anthropics_messages_share_a_conversation_wherever_they_want_it_cached() -> None:
    def asked(*messages: tuple[str, Any], system: Any = "Be brief.", **more: Any) -> tuple[Key, ...]:
        said = [{"role": role, "content": content} for role, content in messages]
        return READER.read("/v1/messages", body(system=system, messages=said, max_tokens=9, **more)).keys

    def text(text: str, **more: Any) -> dict[str, Any]:
        return {"type": "text", "text": text, **more}

    here = {"cache_control": {"type": "ephemeral"}}
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "x" * 3000}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("seen")]}
    turns = [("user", [text("Look.")]), ("assistant", [text("Yes."), call]), ("user", [result])]
    first = asked(*turns[:1])
    whole = asked(*turns)
    assert shared(first, whole) == first[-1].length
    marked = asked(turns[0], ("assistant", [text("Yes.", **here), call]), ("user", [{**result, **here}]))
    assert marked == whole
    assert asked(("user", "Look.")) == first == asked(*turns[:1], system=[text("Be brief.", **here)])
    assert whole[-1].length > 3000  # a call is as long as what it says
    for other in (
        asked(*turns[:1], system="Be long."),
        asked(*turns[:1], system=None),
        asked(*turns[:1], tools=[{"name": "look", "input_schema": {}}]),
        asked(*turns[:1], thinking={"type": "enabled", "budget_tokens": 9}),
        asked(("user", [text("Look.")]), ("assistant", [text("Yes."), {**call, "name": "see"}])),
    ):
        assert other[-1].name not in names(whole)
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 9000}}
    for said in (image, {**result, "content": [image]}):
        assert asked(("user", [said]))[-1].length < 9000


def test_embeddings_are_read() -> None:
    assert READER.read("/v1/embeddings", body(input="Hi")).keys
    assert READER.read("/v1/embeddings", body(messages=[{"role": "user", "content": "Hi"}])).keys


def test_what_the_proxy_needs_is_read() -> None:
    reading = READER.read(
        CHAT + "?x=1", body(messages=[{"role": "user", "content": "Hi"}], stream=True, max_tokens=9, user="u")
    )
    assert (reading.model, reading.stream, reading.max_tokens, reading.session) == ("m", True, 9, "u")


def test_a_path_that_is_not_known_is_not_judged() -> None:
    assert READER.read("/v1/rerank", body(query=7)).model == "m"
    for odd in (b"", b"{", b"\xff", b"[]", b'{"model": 7}', b"{" * 10_000):
        assert READER.read("/v1/audio/transcriptions", odd).keys == ()


@pytest.mark.parametrize(
    ("path", "sent", "named"),
    [
        (CHAT, b"", "JSON"),
        (CHAT, b"{", "JSON"),
        (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "JSON"),
        (CHAT, b'{"messages": [' + b"[" * 100_000, "deeply"),
        (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "tools": ["\xff"]}', "JSON"),
        (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "tools": [1e999]}', "JSON"),
        (CHAT, b"[]", "array"),
        (CHAT, b"{}", "messages is missing"),
        (CHAT, b'{"messages": []}', "messages is empty"),
        (CHAT, b'{"messages": "Hi"}', "messages is text"),
        (CHAT, b'{"messages": ["Hi"]}', "messages[0] is text"),
        (CHAT, b'{"messages": [{"content": "Hi"}]}', "messages[0] has no role"),
        (CHAT, b'{"messages": [{"role": "user", "content": 7}]}', "messages[0].content is a number"),
        (CHAT, b'{"model": 7, "messages": [{"role": "user", "content": "Hi"}]}', "model is a number"),
        (CHAT, b'{"cache_salt": {}, "messages": []}', "cache_salt is an object"),
        (TEXT, b"{}", "prompt is missing"),
        (TEXT, b'{"prompt": []}', "prompt is empty"),
        (TEXT, b'{"prompt": {}}', "prompt is an object"),
        (TEXT, b'{"prompt": [1, -1]}', "no token id"),
        (TEXT, b'{"prompt": [1, true]}', "no token id"),
        (TEXT, b'{"prompt": [1, "a"]}', "no token id"),
        (TEXT, b'{"prompt": [1, 4294967296]}', "no token id"),
        (TEXT, b'{"prompt": [null]}', "prompt[0] is null"),
        (TEXT, b'{"prompt": [["a"]]}', "prompt[0] is an array of text"),
        ("/v1/responses", b"{}", "input is missing"),
        ("/v1/responses", b'{"input": [7]}', "input[0] is a number"),
        ("/v1/responses", b'{"input": "x", "instructions": 7}', "instructions is a number"),
        ("/v1/embeddings", b"{}", "input is missing"),
        ("/v1/messages", b"{}", "messages is missing"),
        ("/v1/messages", b'{"messages": [7]}', "messages[0] has no role"),
        (
            "/v1/messages",
            b'{"messages": [{"role": "user", "content": 7}]}',
            "messages[0].content is a number",
        ),
        ("/v1/messages", b'{"system": 7, "messages": []}', "system.content is a number"),
    ],
)
def test_a_body_that_no_worker_could_answer_is_refused_by_name(path: str, sent: bytes, named: str) -> None:
    with pytest.raises(RefusedError) as refused:
        READER.read(path, sent)
    assert named in str(refused.value)


def test_the_number_of_names_is_bounded_and_the_last_turns_are_kept() -> None:
    many = [("user", f"{number} " + "y" * 900) for number in range(20_000)]
    keys = chat(*many)
    assert len(keys) <= MAX_KEYS <= 256
    assert [key.length for key in keys] == sorted({key.length for key in keys})
    following = chat(*many, ("assistant", "z"), ("user", "w"))
    assert shared(keys, following) == keys[-1].length
    assert len(CUTS) + MAX_BOUNDARIES - 1 == MAX_KEYS


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
PARTS = st.lists(
    st.builds(lambda text: {"type": "text", "text": text}, st.text(max_size=6))
    | st.builds(lambda url: {"type": "image_url", "image_url": {"url": url}}, st.text(max_size=3)),
    max_size=3,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "tool", "assistant"]), "content": st.text(max_size=8) | PARTS},
        optional={"name": st.text(max_size=3), "tool_calls": st.lists(VALUES, max_size=2), "extra": VALUES},
    ),
    min_size=1,
    max_size=4,
)


def meaning(message: dict[str, Any]) -> Any:
    """What the names are meant to tell apart."""
    content = message["content"]
    parts = [content] if isinstance(content, str) else content
    said = [part["text"] if isinstance(part, dict) and part["type"] == "text" else part for part in parts]
    return said, {
        key: value for key, value in message.items() if key != "content" and value not in (None, [])
    }


def turned(value: Any) -> Any:
    """The same JSON with the keys of its objects in another order."""
    if isinstance(value, dict):
        return {key: turned(inner) for key, inner in reversed(value.items())}
    return [turned(inner) for inner in value] if isinstance(value, list) else value


@settings(max_examples=runs(100), deadline=None)
@given(messages=MESSAGES)
def test_order_of_keys_and_white_space_change_no_name(messages: list[dict[str, Any]]) -> None:
    one = json.dumps({"model": "m", "messages": messages, "tools": messages}).encode()
    other = json.dumps(turned(json.loads(one)), indent=3, ensure_ascii=False).encode()
    assert READER.read(CHAT, one).keys == READER.read(CHAT, other).keys


@settings(max_examples=runs(100), deadline=None)
@given(one=MESSAGES, other=MESSAGES)
def test_equal_names_mean_equal_prefixes(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    for count in range(1, min(len(one), len(other)) + 1):
        same = json.dumps([meaning(m) for m in one[:count]], sort_keys=True) == json.dumps(
            [meaning(m) for m in other[:count]], sort_keys=True
        )
        first, second = (READER.read(CHAT, body(messages=all_[:count])).keys[-1] for all_ in (one, other))
        assert (first.name == second.name) is same
        assert not same or first == second


@settings(max_examples=runs(100), deadline=None)
@given(parts=st.lists(st.text(max_size=30), min_size=2, max_size=5), cut=st.integers(0, 3))
def test_where_one_message_ends_and_the_next_begins_matters(parts: list[str], cut: int) -> None:
    whole = chat(*(("user", part) for part in parts))
    cut = min(cut, len(parts) - 2)
    joined = [*parts[:cut], parts[cut] + parts[cut + 1], *parts[cut + 2 :]]
    assert chat(*(("user", part) for part in joined))[-1].name != whole[-1].name


@settings(max_examples=runs(100), deadline=None)
@given(common=st.integers(0, 40_000), one=st.integers(1, 9000), other=st.integers(1, 9000))
def test_two_texts_share_the_names_of_what_they_share(common: int, one: int, other: int) -> None:
    start = "ab" * (common // 2)
    first, second = chat(("user", start + "1" * one)), chat(("user", start + "2" * other))
    framing = first[-1].length - len(start) - one
    assert shared(first, second) <= len(start) + framing
    expected = max((cut for cut in CUTS if cut <= len(start)), default=0)
    assert shared(first, second) >= expected


def test_long_tools_count_as_a_part_of_the_prompt() -> None:
    tools = [{"type": "function", "function": {"name": f"f{n}", "description": "d" * 500}} for n in range(40)]
    keys = chat(("user", "x" * 5000), tools=tools)
    assert keys[0].length > 20_000
    assert [key.length for key in keys] == sorted({key.length for key in keys})
    assert keys[-1].length - keys[0].length < 5100
