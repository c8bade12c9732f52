"""What counts as equal bytes and equal answers."""

from hypothesis import given
from hypothesis import strategies as st
from tests.demo.steps_made import reply

from kvferry.demo.engineview import block_tokens_of, counter_of
from kvferry.demo.verify import check_answer, check_blocks

PAGE = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
vllm:cache_config_info{block_size="128",cache_dtype="auto",engine="0"} 1.0
vllm:prefix_cache_hits_total{engine="0",model_name="demo"} 1.0e+02
vllm:prefix_cache_hits_total{engine="1",model_name="demo"} 5.0
"""


@given(computed=st.sets(st.text(min_size=1), max_size=20), lost=st.integers(0, 20))
def test_blocks_pass_only_when_every_reused_one_is_among_the_computed(computed: set[str], lost: int) -> None:
    ordered = sorted(computed)
    kept = ordered[: max(0, len(ordered) - lost)]
    check = check_blocks(kept, computed, wanted=len(ordered))
    assert check.passed == (len(kept) == len(ordered))


def test_answers_are_equal_by_text_and_the_difference_of_logprobs_is_told() -> None:
    assert check_answer(reply(), reply(), against="x").passed
    assert check_answer(reply(), reply(), against="x").largest_difference == 0.0
    assert not check_answer(reply(text="Salt."), reply(), against="x").passed


def test_figures_are_read_off_the_engines_page() -> None:
    assert block_tokens_of(PAGE) == 128
    assert counter_of(PAGE, "vllm:prefix_cache_hits") == 105.0
    assert counter_of(PAGE, "vllm:nothing") == 0.0
