"""Who refuses which ``cache_salt``: vLLM's API says so to the client, and what passes it can be used."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.engines.vllm_engines import output
from tests.identity.examples import chain

from kvferry.errors import RefusedError
from kvferry.identity.chunks import Extras

# As they stand in a request's JSON.
MALFORMED = (
    '""',
    "5",
    "true",
    '["a"]',
    '{"a": 1}',
    '"\\ud800"',
    '"a\\u0000b"',
    '"../x"',
    json.dumps("x" * 129),
)
USABLE = (" ", "x" * 128, "\U0001f642" * 128, "tenant:42", "\n")
_ASK = """
import json, sys
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMValidationError

def ask(kind, body, salt):
    try:
        return kind.model_validate({**body, "model": "m", "cache_salt": json.loads(salt)}).cache_salt
    except (ValueError, VLLMValidationError) as error:  # which the server answers with 400
        return {"refused": str(error)}

chat = {"messages": [{"role": "user", "content": "p"}]}
kinds = (CompletionRequest, {"prompt": "p"}), (ChatCompletionRequest, chat)
print(json.dumps([[ask(kind, body, salt) for salt in sys.argv[1:]] for kind, body in kinds]))
"""


@pytest.mark.engine
def test_vllm_refuses_a_malformed_salt_to_the_client_and_what_it_lets_pass_can_be_used(
    tmp_path: Path,
) -> None:
    asked = [*MALFORMED, *map(json.dumps, USABLE)]
    answers = json.loads(output(["-c", _ASK, *asked], tmp_path).splitlines()[-1])
    assert len(answers) == 2  # completions and chats
    for answered in answers:
        refused, passed = answered[: len(MALFORMED)], answered[len(MALFORMED) :]
        assert all("cache_salt" in answer["refused"] for answer in refused)
        assert passed == list(USABLE)
    for salt in USABLE:
        assert Extras(cache_salt=salt).cache_salt == salt


@given(st.sets(st.none() | st.text(max_size=6), min_size=2, max_size=8))
@hypothesis_settings(max_examples=50, deadline=None)
def test_no_two_salts_share_a_chunk_and_an_empty_one_is_not_none(salts: set[str | None]) -> None:
    named = [chain(64, extras=Extras(cache_salt=salt)).digests for salt in {*salts, None, ""}]
    assert len({digest for digests in named for digest in digests}) == sum(map(len, named))


@given(
    st.one_of(
        st.binary(), st.integers(), st.floats(), st.lists(st.text()), st.text(min_size=1025), st.booleans()
    )
)
@hypothesis_settings(max_examples=50, deadline=None)
def test_what_is_no_short_text_is_refused_and_not_made_into_one(salt: object) -> None:
    with pytest.raises(RefusedError, match="cache_salt"):
        Extras(cache_salt=salt)  # type: ignore[arg-type]
