"""``kvferry warm --engine`` at a server with the whole of the API: what was sent is in its cache then."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.openai_api import OpenAiServer

from kvferry.cli import warm_prompts
from kvferry.cli.main import main

KEY = "mark-of-a-key"
SYSTEM = "a long system prompt. " * 20
PROMPTS: list[dict[str, Any]] = [
    *(
        {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{n}?"}]}
        for n in range(8)
    ),
    *({"prompt": f"{n}: {SYSTEM}"} for n in range(8)),
]


@pytest.fixture
def warm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """The command over these prompts at a server; what it prints, with its errors."""
    monkeypatch.setattr(warm_prompts, "PAUSE_S", 0.001)
    monkeypatch.setattr(warm_prompts, "TRIES", 10_000)  # as patient as it takes
    monkeypatch.setenv("OPENAI_API_KEY", KEY)

    def run(
        server: OpenAiServer, prompts: list[dict[str, Any]], *, code: int = 0, at: int = 4
    ) -> dict[str, Any]:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(f"{json.dumps(each)}\n" for each in prompts))
        asked = ["warm", "--engine", server.url, str(path), "--json", "--concurrency", str(at)]
        assert main(asked) == code
        out, err = capsys.readouterr()
        assert KEY not in out + err
        return {**(json.loads(out) if out else {}), "err": err}

    return run


Warm = Callable[..., dict[str, Any]]


@pytest.mark.parametrize("tells", [True, False])
def test_what_was_sent_is_reused_the_next_time(warm: Warm, tells: bool) -> None:
    """By the answers, or by the engine's counters where the answers do not say."""
    with OpenAiServer(key=KEY, tells=tells) as server:
        first = warm(server, PROMPTS)
        assert (first["prompts"], first["failed"]) == (len(PROMPTS), 0)
        assert first["computed_tokens"] == server.computed_tokens
        assert first["reused_tokens"] == server.reused_tokens
        before = server.computed_tokens
        second = warm(server, PROMPTS)
        assert second["prompt_tokens"] == first["prompt_tokens"]
        assert second["computed_tokens"] == server.computed_tokens - before
        assert second["computed_tokens"] <= 16 * len(PROMPTS), "a block of each at most"


def test_more_at_a_time_than_the_engine_takes_is_sent_again_until_all_is_there(warm: Warm) -> None:
    with OpenAiServer(key=KEY, most=1) as server:
        said = warm(server, PROMPTS, at=8)
        assert (said["prompts"], said["failed"]) == (len(PROMPTS), 0)


def test_what_is_too_long_is_named_and_the_rest_is_sent(warm: Warm) -> None:
    with OpenAiServer(key=KEY) as server:
        said = warm(server, [PROMPTS[0], {"prompt": "x" * 5000}, PROMPTS[1]], code=1)
        assert (said["prompts"], said["failed"]) == (2, 1)
        assert (
            "prompts.jsonl:2: the engine refused it (400): This model's maximum context length" in said["err"]
        )


def test_tenants_do_not_share_what_is_warmed(warm: Warm) -> None:
    with OpenAiServer(key=KEY) as server:
        warm(server, [{**PROMPTS[0], "cache_salt": "a"}])
        said = warm(server, [{**PROMPTS[0], "cache_salt": "b"}])
        assert said["reused_tokens"] == 0
        assert warm(server, [{**PROMPTS[0], "cache_salt": "a"}])["reused_tokens"] > 0


def test_a_key_that_is_not_let_in_is_one_line(warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "another")
    with OpenAiServer(key=KEY) as server:
        said = warm(server, PROMPTS, code=2)
        assert said["err"].count("\n") == 1
        assert "401" in said["err"]
        assert "OPENAI_API_KEY" in said["err"]
