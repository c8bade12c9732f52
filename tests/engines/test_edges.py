"""The connector's edges: the guard, pinned blocks, settings, versions, prefill times."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.engines.vllm.announced import Announced
from kvferry.engines.vllm.compat import check_transfer_config, check_version
from kvferry.engines.vllm.guard import Guard, guarded
from kvferry.engines.vllm.messages import LoadResult, SaveResult, WorkerReport
from kvferry.engines.vllm.pins import Pins
from kvferry.engines.vllm.prefill import UNKNOWN, PrefillWatch
from kvferry.engines.vllm.settings import ConnectorSettings, parse_settings
from kvferry.errors import BrokenError, MisconfiguredError
from kvferry.testing.fake_engine import BlockPool


class Hooked:
    """Something with guarded hooks."""

    def __init__(self) -> None:
        self.guard = Guard("test")
        self.calls = 0

    @guarded(lambda self, number: -number)
    def hook(self, number: int) -> int:
        self.calls += 1
        if number == 13:
            raise BrokenError("thirteen")
        return number


def test_a_hook_that_raises_answers_with_its_fallback_and_stays_off() -> None:
    hooked = Hooked()
    assert [hooked.hook(n) for n in (1, 13, 2)] == [1, -13, -2]
    assert (hooked.calls, hooked.guard.errors) == (2, 1)


def test_a_forked_copy_is_off_from_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    hooked = Hooked()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert hooked.hook(1) == -1
    assert hooked.calls == 0


def test_pinned_blocks_return_once_every_rank_has_reported() -> None:
    pool, pins = BlockPool(8), Pins(ranks=2)
    pins.bind(pool)
    pins.pin(1, [2, 3])
    assert (pins.pending, len(pool.free)) == (1, 6)
    assert not pins.reported(1)
    assert pins.reported(1)
    assert not pins.reported(1)
    assert (pins.pending, len(pool.free)) == (0, 8)


def test_an_announced_load_is_handed_out_once() -> None:
    announced = Announced()
    announced.add("a", [1, 2])
    announced.add("b", [3])
    announced.sent("a")
    assert announced.take() == (("b", (3,)),)
    assert announced.take() == ()


def test_reports_of_ranks_add_up() -> None:
    one = WorkerReport([LoadResult("a", 1, 2, 3.0, "complete")], [], [4])
    two = WorkerReport([], [SaveResult(5, (), 0, 0)], [4])
    both = one.aggregate(two)
    assert (len(both.loads), len(both.saves), both.steps) == (1, 1, [4, 4])
    with pytest.raises(BrokenError):
        one.aggregate(object())


@pytest.mark.parametrize(
    ("extra", "word"),
    [
        ({"sockets": "/x"}, "did you mean socket"),
        ({"chunk_tokens": "256"}, "'256'"),
        ({"chunk_tokens": 0}, "0"),
        ({"chunk_tokens": True}, "True"),
        ({"deadline_cap_ms": -1}, "-1"),
        ({"socket": 5}, "5"),
        ({"domain": ""}, "domain"),
    ],
)
def test_a_wrong_setting_is_one_line_with_its_value(extra: dict[str, Any], word: str) -> None:
    with pytest.raises(MisconfiguredError, match=word) as caught:
        parse_settings(extra, environ={})
    assert "\n" not in str(caught.value)


def test_settings_have_defaults() -> None:
    found = parse_settings({}, environ={"KVFERRY_SOCKET": "/s"})
    assert found == ConnectorSettings(socket=Path("/s"))


@pytest.mark.parametrize("version", ["0.32.0", "0.32.5", "0.32.0+cpu", "0.32.1.dev3"])
def test_supported_versions_pass(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0", "unknown", ""])
def test_other_versions_are_refused_with_the_range(version: str) -> None:
    with pytest.raises(MisconfiguredError, match=r">=0\.32,<0\.33"):
        check_version(version)


@pytest.mark.parametrize(("policy", "role"), [("fail", "kv_both"), ("recompute", "kv_neither")])
def test_settings_that_could_lose_requests_are_refused(policy: str, role: str) -> None:
    transfer = SimpleNamespace(kv_load_failure_policy=policy, kv_role=role)
    with pytest.raises(MisconfiguredError, match="--kv-transfer-config"):
        check_transfer_config(SimpleNamespace(kv_transfer_config=transfer))  # type: ignore[arg-type]


def test_prefill_is_learnt_from_single_prefills_only() -> None:
    watch = PrefillWatch()
    assert watch.prefill(now=0.0) == UNKNOWN
    assert not watch.planned(1, [(1, 500), (1, 60)], now=1.0)
    assert not watch.planned(2, [(512, 0), (512, 0)], now=1.0)
    for step, tokens in enumerate([128, 256, 512, 1024], start=10):
        assert watch.planned(step, [(tokens, 0), (1, 900)], now=10.0 * step)
        watch.returned(step, now=10.0 * step + tokens / 1000)
        watch.returned(step, now=10.0 * step + tokens)
    watch.prefill(now=1000.0)
    watch.close()
    learnt = watch.prefill(now=1000.5)
    assert learnt.per_token_s == pytest.approx(0.001, rel=0.05)
