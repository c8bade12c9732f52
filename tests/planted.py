"""What a planted defect has to lead to."""

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

MAX_EXAMPLES = 3000  # some defects are rare; the search ends with the first


def must_find(machine: type[RuleBasedStateMachine], steps: settings) -> None:
    """Run the machine as it is now: it must fail, and say what reproduces the failure."""
    quick = settings(
        steps,
        max_examples=MAX_EXAMPLES,
        phases=[Phase.generate],
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
    )
    with pytest.raises(Exception) as found:
        run_state_machine_as_test(machine, settings=quick)
    story = "\n".join(found.value.__notes__)
    assert f"state = {machine.__name__}()" in story
    assert "state.teardown()" in story
    assert "@reproduce_failure(" in story
