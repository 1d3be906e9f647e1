"""What the service manager is told, in which words, and that nothing is without one."""

import logging
import os
import socket
import uuid

import pytest
from support.manager import manager
from support.waiting import until

from protocol.errors import ConfigError
from protocol.notify import MAX_STATUS, Notifier


@pytest.fixture(params=["path", "abstract"])
def address(request, tmp_path):
    return str(tmp_path / "notify") if request.param == "path" else f"@dflashd-{uuid.uuid4().hex}"


def test_a_start_a_life_and_an_end_in_the_managers_words(address):
    with manager(address) as listening:
        notifier = Notifier.of(listening.environment)
        notifier.loading("loading: 1 of 2")
        notifier.ready("serving")
        notifier.status("serving")
        notifier.status("serving, without a draft")
        notifier.status("serving, without a draft")
        notifier.stopping()
        notifier.stopping()
        assert listening.told == [
            *("EXTEND_TIMEOUT_USEC=120000000", "STATUS=loading: 1 of 2"),
            *("READY=1", "STATUS=serving"),
            *("STATUS=serving", "STATUS=serving, without a draft"),
            *("STOPPING=1", "STATUS=ending"),
        ]


def test_a_sign_of_life_is_sent_each_half_of_the_time_that_the_manager_gives(tmp_path):
    with manager(str(tmp_path / "notify"), watchdog=0.1) as listening:
        notifier = Notifier.of(listening.environment)
        assert notifier.interval == 0.05
        for _ in range(1000):
            notifier.alive()
        assert len(listening.told) < 1000

        def beat():
            notifier.alive()
            return listening.told.count("WATCHDOG=1") >= 3

        until(beat)


def test_without_a_manager_nothing_happens(monkeypatch):
    monkeypatch.setattr(socket, "socket", None)
    notifier = Notifier.of({"WATCHDOG_USEC": "1000"})
    assert notifier.interval is None
    notifier.loading("a")
    notifier.ready("b")
    notifier.status("c")
    notifier.alive()
    notifier.stopping()


@pytest.mark.parametrize(
    ("stated", "interval"),
    [
        ({"WATCHDOG_USEC": "3000000"}, 1.5),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 1.5),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({}, None),
    ],
    ids=["anyone", "this process", "another", "a word", "no time", "nobody"],
)
def test_signs_of_life_are_for_the_process_that_is_meant(stated, interval):
    assert Notifier.of({"NOTIFY_SOCKET": "/run/x", **stated}).interval == interval


def test_a_status_is_one_line_of_bounded_length(tmp_path):
    with manager(str(tmp_path / "notify")) as listening:
        notifier = Notifier.of(listening.environment)
        notifier.status("one\nREADY=1\n  two")
        notifier.status("x" * 1000)
        assert listening.told == ["STATUS=one READY=1 two", f"STATUS={'x' * MAX_STATUS}"]


def test_a_manager_that_is_gone_is_a_line_of_the_log_and_no_error(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        Notifier(str(tmp_path / "gone")).ready("serving")
    assert "the service manager was not told READY=1" in caplog.text


def test_an_address_of_another_kind_is_refused():
    with pytest.raises(ConfigError, match="NOTIFY_SOCKET is vsock:2:1; a path or an @name"):
        Notifier.of({"NOTIFY_SOCKET": "vsock:2:1"})
