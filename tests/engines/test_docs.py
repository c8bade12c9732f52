"""The connector's page says what the connector does."""

from pathlib import Path

from kvferry.engines.vllm.counters import COUNTERS

PAGE = Path(__file__).parents[2] / "docs" / "engines" / "vllm.md"


def test_every_counter_is_documented_with_its_own_words() -> None:
    text = PAGE.read_text()
    assert [f"| `{name}` | {meaning} |" in text for name, meaning in COUNTERS.items()] == [True] * len(
        COUNTERS
    )
