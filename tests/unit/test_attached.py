"""Lives that are given to daemons which run on their own, and when one may be driven."""

import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.counting_daemon import hello

from launch.attached import CLOCK_STEP, Attached, Attacher, leave_messages
from launch.daemon_process import Lost, Present
from launch.plan import Attach
from protocol.driving import DriverLock, read_driver
from protocol.errors import DaemonDied, DeadlineExceeded, NotTheDriver, ProtocolError, StaleMessage
from protocol.messages import WIRE_VERSION, Hello, Leave
from protocol.run_directory import RunDirectory

HOLDER = Path(__file__).parent.parent / "support" / "lock_holder.py"

HELLO = hello(Hello(target_life=5, wire_version=WIRE_VERSION, nonce=1), target_life=5, draft_life=0)


@pytest.fixture
def attacher(tmp_path):
    attacher = Attacher(Attach(target=str(tmp_path), draft="tcp://127.0.0.1:7"), {})
    yield attacher
    attacher.close()


@contextmanager
def driven_by_another(run_dir, life=1):
    command = (sys.executable, str(HOLDER), str(run_dir), str(life))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"held\n"
            yield process
        finally:
            process.kill()


def test_lives_grow_for_both_daemons_together(attacher):
    before = time.time_ns()
    lives = [attacher.peer(role).life for role in ("target", "draft", "target", "draft")]
    assert lives[0] >= before
    assert lives == sorted(set(lives))


def test_a_clock_that_was_set_back_gives_no_life_again(attacher, tmp_path):
    ahead = time.time_ns() + CLOCK_STEP
    lock = DriverLock(tmp_path)
    lock.take(ahead)
    lock.release()
    assert attacher.peer("target").life == ahead + 1
    assert read_driver(tmp_path).life == ahead


def test_an_earlier_driver_on_another_host_whose_clock_was_ahead_is_passed_in_the_end(attacher):
    peer = attacher.peer("draft")
    first = peer.life
    for _ in range(3):
        peer.error = StaleMessage("life 1 is not above the last one, 2")
        peer = attacher.peer("draft", peer)
    assert peer.life >= first + 3 * CLOCK_STEP


@pytest.mark.parametrize(
    ("role", "lives"), [("target", {"target_life": 5}), ("draft", {"target_life": 0})]
)
@pytest.mark.parametrize("error", [DeadlineExceeded("it hung"), ProtocolError("it lied")])
def test_a_sick_daemon_is_asked_to_leave_the_life_it_was_sick_in(tmp_path, role, lives, error):
    attacher = Attacher(Attach(target=str(tmp_path / "t"), draft=str(tmp_path / "d")), {})
    peer = attacher.peer(role)
    peer.life, peer.error, peer.hello = 5, error, HELLO
    other = {"draft_life": 0} if role == "target" else {"draft_life": 5}
    assert leave_messages(peer) == (Leave(**lives, **other, reason=str(error)),)
    assert attacher.peer(role, peer).process.opening == leave_messages(peer)


def test_one_that_died_or_was_never_met_is_not_asked(attacher):
    peer = attacher.peer("target")
    assert leave_messages(None) == ()
    peer.error = DeadlineExceeded("it did not answer Hello")
    assert leave_messages(peer) == ()
    peer.hello, peer.error = HELLO, DaemonDied("it ended")
    assert leave_messages(peer) == ()


def test_a_daemon_is_waited_for_and_then_present(tmp_path):
    folder = tmp_path / "d"
    lock = DriverLock(folder)
    life = Attached("target", folder, lock, 5, ())
    assert life.start() == []
    assert life.on_deadline() == []  # not due
    with RunDirectory(folder):
        life.deadline = time.monotonic()
        assert life.on_deadline() == [Present()]
        assert life.fds
        assert life.on_deadline() == []
        assert read_driver(folder).life == 5
        life.close()
        assert life.fds == ()
        lock.release()
    assert life.has_ended


def test_a_daemon_that_comes_while_another_drives_is_lost_with_his_pid(tmp_path):
    folder = tmp_path / "d"
    life = Attached("target", folder, DriverLock(folder), 5, ())
    assert life.start() == []
    with RunDirectory(folder), driven_by_another(folder) as process:
        life.deadline = time.monotonic()
        [lost] = life.on_deadline()
        assert isinstance(lost, Lost)
        assert isinstance(lost.error, NotTheDriver)
        assert str(process.pid) in str(lost.error)
        assert life.fds == ()
