import logging

import pytest

from protocol.boundary import MAX_DETAIL, answer, each
from protocol.errors import FeatureExpired, PositionMismatch
from protocol.messages import (
    Close,
    Closed,
    ClosedItem,
    CloseItem,
    Failed,
    ItemFailed,
)

ITEMS = tuple(CloseItem(sequence=number, round=number + 10) for number in range(3))
MESSAGE = Close(target_life=5, draft_life=6, items=ITEMS)


def failing(error, *, at=1):
    def call(item):
        if item.sequence == at:
            raise error
        return ClosedItem(sequence=item.sequence, round=item.round, committed=1)

    return call


def test_one_sequence_fails_alone():
    first, second, third = each(ITEMS, failing(PositionMismatch("4, not 5")))
    assert second == ItemFailed(sequence=1, round=11, code="position_mismatch", detail="4, not 5")
    assert isinstance(first, ClosedItem)
    assert isinstance(third, ClosedItem)


def test_a_defect_in_one_sequence_does_not_lose_what_others_committed(caplog):
    results = each(ITEMS, failing(ZeroDivisionError("secret internals")))
    assert [type(result) for result in results] == [ClosedItem, ItemFailed, ClosedItem]
    assert results[1].code == "internal"
    assert "secret" not in results[1].detail
    assert "secret internals" in caplog.text  # with its traceback, in the log


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("could not create a memory object"),
    ],
)
def test_a_failed_allocation_is_out_of_memory_not_a_defect(error):
    assert each(ITEMS, failing(error))[1].code == "out_of_memory"


def test_a_message_is_answered_with_what_the_daemon_returns():
    reply = Closed(target_life=5, draft_life=6, results=())
    assert answer(lambda message: reply, MESSAGE) is reply


@pytest.mark.parametrize(
    ("error", "code", "detail"),
    [
        (FeatureExpired("rows 1..2"), "feature_expired", "rows 1..2"),
        (KeyError("secret"), "internal", "Close failed; the daemon's log says why"),
        (FeatureExpired("x" * 10 * MAX_DETAIL), "feature_expired", "x" * MAX_DETAIL),
    ],
)
def test_an_exception_becomes_failed_with_the_lives_of_the_message(error, code, detail, caplog):
    caplog.set_level(logging.DEBUG)

    def handle(message):
        raise error

    assert answer(handle, MESSAGE) == Failed(target_life=5, draft_life=6, code=code, detail=detail)
    assert code in caplog.text or "Traceback" in caplog.text


def test_rows_that_are_gone_are_answered_and_are_no_line_of_the_log(caplog):
    caplog.set_level(logging.INFO)
    first, second = (each(ITEMS, failing(kind("x"))) for kind in (FeatureExpired, PositionMismatch))
    assert (first[1].code, second[1].code) == ("feature_expired", "position_mismatch")
    assert [record.args[1] for record in caplog.records] == ["position_mismatch"]


def test_an_end_of_the_process_is_not_an_answer():
    def handle(message):
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        answer(handle, MESSAGE)
