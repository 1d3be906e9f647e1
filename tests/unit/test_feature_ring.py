"""The ring's geometry against a model that keeps one cell per ring row."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ConfigError
from protocol.feature_ring import oldest_valid, plan, spans


@given(
    capacity=st.integers(1, 40),
    start=st.integers(0, 200),
    count=st.integers(0, 40),
)
def test_spans_visit_each_position_once_in_order_at_its_ring_row(capacity, start, count):
    count = min(count, capacity)
    visited = [
        (position, span.row + position - span.start)
        for span in spans(start, start + count, capacity)
        for position in range(span.start, span.stop)
    ]
    assert visited == [(p, p % capacity) for p in range(start, start + count)]


@given(
    capacity=st.integers(1, 40),
    start=st.integers(0, 200),
    count=st.integers(0, 40),
)
def test_spans_are_at_most_two_and_none_is_empty(capacity, start, count):
    found = spans(start, start + min(count, capacity), capacity)
    assert len(found) <= 2
    assert all(span.stop > span.start for span in found)
    assert all(span.row + span.stop - span.start <= capacity for span in found)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 9), (100, 109)])
def test_spans_that_do_not_fit_are_refused_with_the_numbers(start, stop):
    with pytest.raises(ConfigError, match=f"{start}..{stop}"):
        spans(start, stop, 8)


@given(
    window=st.integers(1, 12),
    widest=st.integers(1, 12),
    forwards=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), max_size=40),
)
def test_the_smallest_legal_ring_keeps_the_window_through_any_forward(window, widest, forwards):
    shape = plan(slots=1, window=window, widest_forward=widest, row_width=1, dtype="float32")
    cells = [-1] * shape.capacity  # the position whose row each ring row holds
    committed = high = 0
    for wanted, kept in forwards:
        width = min(wanted, widest)
        high = max(high, committed + width)
        for position in range(committed, committed + width):
            cells[position % shape.capacity] = position
        oldest = oldest_valid(high, shape.capacity)
        assert oldest <= max(0, committed - window)
        assert all(cells[p % shape.capacity] == p for p in range(oldest, committed))
        committed += min(kept, width)


@given(
    capacity=st.integers(1, 20),
    written=st.integers(0, 100),
)
def test_one_below_the_oldest_valid_row_is_overwritten(capacity, written):
    cells = {}
    for position in range(written):
        cells[position % capacity] = position
    oldest = oldest_valid(written, capacity)
    assert all(cells[p % capacity] == p for p in range(oldest, written))
    assert oldest == 0 or cells[(oldest - 1) % capacity] != oldest - 1


def test_the_guard_is_the_widest_forward():
    shape = plan(slots=2, window=100, widest_forward=33, row_width=8, dtype="bfloat16")
    assert (shape.guard, shape.capacity) == (33, 133)


@pytest.mark.parametrize("wrong", ["slots", "window", "widest_forward"])
def test_a_measure_below_one_is_refused(wrong):
    measures = {"slots": 1, "window": 1, "widest_forward": 1} | {wrong: 0}
    with pytest.raises(ConfigError, match="none may be below 1"):
        plan(**measures, row_width=4, dtype="float32")


def test_a_target_without_a_draft_has_rows_of_no_width():
    assert plan(slots=1, window=1, widest_forward=1, row_width=0, dtype="float32").row_width == 0
    with pytest.raises(ConfigError):
        plan(slots=1, window=1, widest_forward=1, row_width=-1, dtype="float32")
