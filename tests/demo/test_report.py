"""The demo's table, page and JSON say what happened, and a difference fails the run."""

import json
from html.parser import HTMLParser

import pytest
from tests.demo.steps_made import loaded, reply

from kvferry.demo import report
from kvferry.demo.steps import Source, Step, source_of, story_of

SETTING = report.Setting("SmolLM2", 2, 2, 5909, 5888, 128, 200.0)
VOID = {"meta", "line", "rect", "path", "br"}


class _Reader(HTMLParser):
    """Checks that tags nest and that nothing is fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "data", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:  # <line/> is reported as an end too
            assert self.open.pop() == tag


def _read(page: str) -> _Reader:
    reader = _Reader()
    reader.feed(page)
    reader.close()
    return reader


def test_a_right_step_has_no_problems() -> None:
    assert loaded().problems == ()


@pytest.mark.parametrize(
    ("step", "word"),
    [
        (loaded(source=Source.COMPUTED), "came from computed"),
        (loaded(cached=5760), "reused 5760 tokens"),
        (loaded(equal=45), "only 45 of 46 blocks"),
        (loaded(same_text=False), "answer differs"),
        (loaded(limit_s=0.1), "limit 0.10 s"),
    ],
)
def test_every_difference_is_a_problem_and_fails_the_run(step: Step, word: str) -> None:
    assert len(step.problems) == 1
    assert word in step.problems[0]
    assert report.document([loaded(), step], SETTING)["passed"] is False


def test_the_page_is_whole_and_fetches_nothing() -> None:
    page = report.html([loaded(), loaded(equal=3)], SETTING)
    reader = _read(page)
    assert reader.open == []
    assert reader.references == []
    assert "script" not in reader.tags
    assert "svg" in reader.tags
    assert "url(" not in page and "@import" not in page
    assert "<never>" not in page


def test_the_page_of_a_failed_run_says_so() -> None:
    assert "This run failed" in report.html([loaded(same_text=False)], SETTING)
    assert "This run failed" not in report.html([loaded()], SETTING)


def test_the_table_has_a_line_per_step_and_no_trailing_blanks() -> None:
    lines = report.terminal([loaded(), loaded()]).splitlines()
    assert len(lines) == 4
    assert all(line == line.rstrip() for line in lines)
    assert "46/46 blocks" in lines[2]


def test_the_json_document_can_be_written() -> None:
    document = json.loads(json.dumps(report.document([loaded()], SETTING)))
    assert document["passed"] is True
    assert document["steps"][0]["source"] == "host memory"


@pytest.mark.parametrize(
    ("cached", "chunks", "source"),
    [
        (0, {"memory": 46}, Source.COMPUTED),
        (5888, {}, Source.OWN),
        (5888, {"memory": 46, "valkey": 0}, Source.MEMORY),
        (5888, {"valkey": 46}, Source.VALKEY),
        (5888, {"memory": 6, "valkey": 40}, Source.MIXED),
    ],
)
def test_the_source_is_the_nodes_word_unless_the_engine_computed(
    cached: int, chunks: dict[str, int], source: Source
) -> None:
    story = story_of([{"reused_chunks": chunks, "reused_bytes": {}}])
    assert source_of(reply(cached=cached), story) is source
