"""The right to drive from another host: one driver at a time, by number and by time."""

import pytest

from protocol.errors import NotTheDriver, StaleMessage
from protocol.lease import Lease

ONE, OTHER = 11, 22


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def lease(clock):
    lease = Lease(10.0, clock)
    lease.claim(5, ONE)
    return lease


def test_the_first_who_comes_drives(lease):
    assert lease.life == 5


def test_another_is_refused_with_the_seconds_that_are_left(lease, clock):
    clock.now += 4.0
    with pytest.raises(NotTheDriver, match=r"6\.0 s"):
        lease.claim(6, OTHER)
    assert lease.life == 5


def test_the_lease_begins_anew_whenever_the_driver_is_heard(lease, clock):
    for _ in range(5):
        clock.now += 9.0
        lease.heard()
    with pytest.raises(NotTheDriver):
        lease.claim(6, OTHER)


def test_a_silent_driver_loses_the_right(lease, clock):
    clock.now += 10.0
    lease.claim(6, OTHER)
    assert lease.life == 6
    with pytest.raises(NotTheDriver):
        lease.claim(7, ONE)


def test_the_daemons_computing_is_no_silence_of_the_driver(lease, clock):
    clock.now += 60.0  # it could hear nobody
    lease.worked(60.0)
    clock.now += 9.0
    with pytest.raises(NotTheDriver):
        lease.claim(6, OTHER)
    clock.now += 2.0
    lease.claim(6, OTHER)


def test_being_heard_never_shortens_the_lease(lease, clock):
    lease.worked(60.0)
    lease.heard()
    clock.now += 69.0
    with pytest.raises(NotTheDriver):
        lease.claim(6, OTHER)


def test_the_driver_itself_begins_a_new_life_at_any_time(lease):
    lease.claim(6, ONE)
    assert lease.life == 6


@pytest.mark.parametrize("life", [4, 5])
def test_a_life_that_is_over_never_comes_again(lease, clock, life):
    clock.now += 11.0
    for owner in (ONE, OTHER):
        with pytest.raises(StaleMessage, match=r"last one, 5"):
            lease.claim(life, owner)
