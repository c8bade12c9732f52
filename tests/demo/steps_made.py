"""Steps for tests, as a run would make them."""

from kvferry.demo.ask import Reply
from kvferry.demo.steps import Source, Step
from kvferry.demo.verify import AnswerCheck, BlockCheck


def reply(*, ttft_s: float = 0.25, cached: int = 5888, text: str = "Grain.") -> Reply:
    """An answer."""
    return Reply("demo1", text, ttft_s, ttft_s + 0.1, 5909, cached, 4, (-0.1, -0.2))


def loaded(
    *,
    source: Source = Source.MEMORY,
    cached: int = 5888,
    equal: int = 46,
    same_text: bool = True,
    limit_s: float | None = None,
) -> Step:
    """A step that loads from host memory."""
    return Step(
        key="memory",
        title="B, which <never> saw it",
        replica="B",
        reply=reply(cached=cached),
        source=source,
        allowed=(Source.MEMORY,),
        reused_tokens=cached,
        loaded_bytes=135_659_520,
        limit_s=limit_s,
        wanted_tokens=5888,
        blocks=BlockCheck(46, equal),
        answer=AnswerCheck("an own hit", same_text, 0.0),
    )
