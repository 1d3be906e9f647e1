"""What can be parked; `tests/process/test_parking.py` parks it."""

from types import SimpleNamespace

from launch.deadlines_heap import DeadlineHeap
from launch.parking import Parking
from protocol.errors import UsageError


def test_a_daemon_that_runs_on_its_own_is_parked_by_whoever_runs_it():
    parking = Parking(SimpleNamespace(spawns=False), None, None, DeadlineHeap())
    said = []
    parking.park("target", said.append, now=True, within=1.0)
    parking.unpark("target", said.append)
    assert [type(one) for one in said] == [UsageError, UsageError]
    assert "service of its own" in str(said[0])
