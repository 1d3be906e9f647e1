"""Signals as events."""

import os
import select
import signal

import pytest

from launch.interrupts import Interrupts
from protocol.errors import InternalError


def test_a_signal_is_recorded_and_wakes_the_loop():
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        assert select.select([interrupts.fd], [], [], 0)[0] == []
        os.kill(os.getpid(), signal.SIGINT)
        assert select.select([interrupts.fd], [], [], 5)[0] == [interrupts.fd]
        interrupts.on_ready()
        assert select.select([interrupts.fd], [], [], 0)[0] == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert select.select([interrupts.fd], [], [], 5)[0] == [interrupts.fd]
    assert interrupts.number is signal.SIGINT  # the first one counts
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_its_with_there_is_nothing_to_watch():
    with pytest.raises(InternalError):
        _ = Interrupts().fd
