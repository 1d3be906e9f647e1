"""How long a daemon may load, by what its earlier lives took."""

import pytest

from launch.loads import FACTOR, Loads
from protocol.config import Deadlines

LIMITS = Deadlines(load=300.0, load_least=30.0)


@pytest.fixture
def loads():
    return Loads(LIMITS)


def test_the_first_load_has_all_the_time_there_is(loads):
    assert loads.allow("target") == 300.0
    loads.note("draft", 1.0)
    assert loads.allow("target") == 300.0


def test_later_ones_have_ten_times_the_slowest_and_at_least_some(loads):
    loads.note("target", 0.5)
    assert loads.allow("target") == 30.0
    loads.note("target", 6.0)
    loads.note("target", 1.0)
    assert loads.allow("target") == FACTOR * 6.0
    loads.note("target", 100.0)
    assert loads.allow("target") == 300.0


def test_each_that_was_too_slow_doubles_the_time_until_one_is_in_time(loads):
    loads.note("target", 1.0)
    allowed = []
    for _ in range(6):
        allowed.append(loads.allow("target"))
        loads.note_late("target")
    assert allowed == [30.0, 60.0, 120.0, 240.0, 300.0, 300.0]
    loads.note("target", 2.0)
    assert loads.allow("target") == 30.0


def test_another_daemon_begins_anew(loads):
    loads.note("draft", 1.0)
    loads.forget("draft")
    loads.forget("target")
    assert loads.allow("draft") == 300.0
