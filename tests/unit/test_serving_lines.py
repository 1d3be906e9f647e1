"""What `dflashd supervisor` says of the steps of its daemons: a line each, and an error once."""

import pytest

from launch.commands.serving import _on_loading
from launch.plan import Loading

PLAN = "the target needs 9 MB, and 5 MB are available (a test):\n  layers  9 MB = 9 x 1.\nUse less."


@pytest.mark.parametrize(
    ("briefly", "line"),
    [
        (True, "the target needs 9 MB, and 5 MB are available (a test)"),
        (False, " ".join(PLAN.split())),
    ],
)
def test_an_error_of_many_lines_is_one_and_its_parts_are_left_out_where_they_come_later(
    briefly, line
):
    said = []
    step = Loading(role="target", stage="failed", detail=PLAN, done=0, total=0)
    _on_loading(said.append, step, briefly=briefly)
    assert said == [f"target daemon: failed: {line}"]


def test_a_step_without_words_is_its_stage_and_a_count_is_no_line():
    said = []
    for total in (0, 5):
        step = Loading(role="draft", stage="loading", detail="", done=0, total=total)
        _on_loading(said.append, step, briefly=True)
    assert said == ["draft daemon: loading"]
