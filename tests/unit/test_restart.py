"""When a daemon that failed is started again."""

import pytest

from launch.plan import FAR_RESTARTS
from launch.restart import Backoff, Restarts
from protocol.config import Deadlines
from protocol.errors import (
    CheckpointError,
    DaemonAbsent,
    DaemonDied,
    InsufficientMemory,
    NotTheDriver,
)

TIMES = Restarts(first=0.1, factor=2.0, longest=1.0, patience=6, rarely=60.0, healthy=10.0)
DIED = DaemonDied("it died")


def test_the_wait_doubles_up_to_the_longest_and_then_it_is_tried_rarely():
    backoff = Backoff(TIMES)
    waits = [backoff.failed(float(n), DIED) for n in range(8)]
    assert waits == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.0, 60.0, 60.0, 60.0])
    assert backoff.is_left_off


def test_a_life_that_served_for_long_ends_the_row():
    backoff = Backoff(TIMES)
    for n in range(4):
        backoff.failed(float(n), DIED)
    backoff.up(10.0)
    assert backoff.failed(20.0, DIED) == pytest.approx(0.1)
    assert backoff.failures == 1


def test_a_life_that_served_briefly_does_not():
    backoff = Backoff(TIMES)
    backoff.failed(0.0, DIED)
    backoff.up(1.0)
    assert backoff.failed(2.0, DIED) == pytest.approx(0.2)


@pytest.mark.parametrize("error", [CheckpointError("x"), InsufficientMemory("x")])
def test_what_trying_again_cannot_help_is_tried_rarely_at_once(error):
    backoff = Backoff(TIMES)
    assert backoff.failed(0.0, error) == 60.0
    assert backoff.is_left_off


def test_a_row_without_end_does_not_overflow():
    backoff = Backoff(Restarts(patience=1000, factor=100.0))
    assert [backoff.failed(0.0, DIED) for _ in range(999)][-1] == 5.0


def test_a_service_that_does_not_come_is_tried_rarely_at_once():
    backoff = Backoff(TIMES)
    assert backoff.failed(0.0, DaemonAbsent("nobody there")) == TIMES.rarely
    assert backoff.is_left_off


def test_a_supervisor_outlasts_the_lease_of_one_that_has_just_ended_before_it_gives_up():
    backoff, now = Backoff(FAR_RESTARTS), 0.0
    while not backoff.is_left_off:
        delay = backoff.failed(now, NotTheDriver("another supervisor drives this daemon"))
        now += 0.0 if backoff.is_left_off else delay
    assert now > Deadlines().lease
