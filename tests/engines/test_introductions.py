"""Facts of workers whose handshake went to another connector come with their first reports."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.engines.vllm import facts
from kvferry.engines.vllm.facts import Introductions
from kvferry.engines.vllm.guard import Guard
from kvferry.engines.vllm.messages import GroupFacts, StepPlan, WorkerFacts, WorkerReport


def _facts(rank: int, problem: str = "") -> WorkerFacts:
    return WorkerFacts(
        rank, 0, (GroupFacts(("layer",), 4096, "layout", 1),), "packing", "cpu", problem=problem
    )


def test_facts_count_once_all_ranks_have_given_them_whatever_their_order() -> None:
    heard = Introductions(ranks=2)
    assert heard.hear([_facts(1)]) is None
    assert heard.hear([_facts(1)]) is None
    assert heard.hear([_facts(0), _facts(1)]) == [_facts(0), _facts(1)]
    assert heard.hear([_facts(0), _facts(1)]) is None


def test_a_problem_of_one_rank_is_heard_at_once() -> None:
    assert Introductions(ranks=2).hear([_facts(0, "no KV")]) == [_facts(0, "no KV")]


def test_requests_wait_for_facts_but_not_for_ever() -> None:
    heard = Introductions(ranks=1)
    assert heard.pending(now=100.0)
    assert heard.pending(now=99.9 + facts.INTRODUCTION_WAIT_S)
    assert not heard.pending(now=100.0 + facts.INTRODUCTION_WAIT_S)
    known = Introductions(ranks=1)
    known.hear([_facts(0)])
    assert not known.pending(now=0.0)


@pytest.mark.engine
class TestConnector:
    """The connector's own hooks."""

    @pytest.fixture
    def connector(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the engine's own imports
            from kvferry.engines.vllm.connector import KvferryConnector

        made = object.__new__(KvferryConnector)
        made.guard = Guard("test")
        made._unsupported = made._worker = made._scheduler = made._weights = None
        made._opening, made._introduced, made._facts = Introductions(ranks=1), 0, _facts(0)
        return made

    def test_another_connectors_handshake_is_left_alone_and_a_request_waits(self, connector: Any) -> None:
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): object()})
        assert connector.get_num_new_matched_tokens(SimpleNamespace(), 0) == (None, False)

    def test_a_worker_introduces_itself_until_it_is_told_whom_it_serves(self, connector: Any) -> None:
        connector.handle_preemptions(StepPlan(step=1))
        assert connector.build_connector_worker_meta() == WorkerReport(facts=[_facts(0)])
        connector.handle_preemptions(StepPlan(step=2, assignment=object()))  # type: ignore[arg-type]
        assert connector.build_connector_worker_meta() is None

    def test_a_report_with_facts_begins_the_scheduler_side(self, connector: Any) -> None:
        begun: list[Any] = []
        connector._begin = begun.append
        report = WorkerReport(facts=[_facts(0)])
        output = SimpleNamespace(kv_connector_worker_meta=report, finished_recving=None)
        for _ in range(2):
            connector.update_connector_output(output)
        assert begun == [[_facts(0)]]

    def test_the_name_is_registered_for_multi_connectors(self, connector: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        assert KVConnectorFactory.get_connector_class_by_name("KvferryConnector") is type(connector)
