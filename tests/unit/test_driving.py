"""The right to drive on one host: held by a process, free when it is dead."""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.waiting import until

from protocol.driving import DRIVER_LOCK, Driver, DriverLock, Locked, is_driven, read_driver
from protocol.errors import NotTheDriver, StaleMessage, Unavailable
from protocol.file_locks import taken

HOLDER = Path(__file__).parent.parent / "support" / "lock_holder.py"


@pytest.fixture
def lock(tmp_path):
    lock = DriverLock(tmp_path)
    yield lock
    lock.release()


@contextmanager
def holder(run_dir, life):
    command = (sys.executable, str(HOLDER), str(run_dir), str(life))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"held\n"
            yield process
        finally:
            process.kill()


def test_the_lock_names_the_driver_and_its_life(lock, tmp_path):
    assert not is_driven(tmp_path)
    lock.take(7)
    assert read_driver(tmp_path) == Driver(os.getpid(), 7)
    assert is_driven(tmp_path)
    lock.take(8)
    assert read_driver(tmp_path) == Driver(os.getpid(), 8)


def test_who_gives_up_the_right_leaves_the_life_and_no_pid(lock, tmp_path):
    lock.take(7)
    lock.release()
    lock.release()
    assert read_driver(tmp_path) == Driver(0, 7)
    assert not is_driven(tmp_path)


def test_a_living_drivers_daemon_is_refused_with_its_pid(lock, tmp_path):
    with holder(tmp_path, 5) as process, pytest.raises(NotTheDriver, match=str(process.pid)):
        lock.take(6)


def test_a_dead_drivers_daemon_is_free_at_once(lock, tmp_path):
    with holder(tmp_path, 5) as process:
        process.kill()
        process.wait()
        lock.take(6)
    assert read_driver(tmp_path) == Driver(os.getpid(), 6)


def test_a_look_at_the_lock_does_not_cost_the_right(lock, tmp_path):
    (tmp_path / DRIVER_LOCK).touch()
    with taken(tmp_path / DRIVER_LOCK) as is_free:
        assert is_free
        with pytest.raises(NotTheDriver, match="unknown"):
            lock.take(6)
    lock.take(6)


def test_without_a_daemon_there_is_nothing_to_drive(tmp_path):
    with pytest.raises(Unavailable, match="no daemon runs in"):
        DriverLock(tmp_path / "none").take(1)


def test_the_right_is_taken_anew_where_its_file_was_removed(lock, tmp_path):
    lock.take(5)
    (tmp_path / DRIVER_LOCK).unlink()
    assert not is_driven(tmp_path)
    lock.take(6)
    assert is_driven(tmp_path)


@pytest.mark.parametrize("text", ["", "12", "a b", "1 2 3", "1 9223372036854775807", "\xff 1"])
def test_a_file_that_makes_no_sense_names_nobody(tmp_path, text):
    (tmp_path / DRIVER_LOCK).write_text(text)
    assert read_driver(tmp_path) == Driver(0, 0)


def test_a_daemon_takes_the_life_that_the_lock_names_and_no_other(lock, tmp_path):
    right = Locked(tmp_path)
    lock.take(7)
    with pytest.raises(NotTheDriver, match=f"process {os.getpid()}"):
        right.claim(8, 0)
    right.claim(7, 0)
    assert right.life == 7


def test_a_daemon_that_nobody_may_drive_takes_no_life(lock, tmp_path):
    right = Locked(tmp_path)
    with pytest.raises(NotTheDriver, match="nobody holds"):
        right.claim(1, 0)
    lock.take(1)
    lock.release()
    with pytest.raises(NotTheDriver, match="nobody holds"):
        right.claim(1, 0)


def test_lives_only_grow(lock, tmp_path):
    right = Locked(tmp_path)
    lock.take(7)
    right.claim(7, 0)
    lock.take(6)
    with pytest.raises(StaleMessage, match="last one, 7"):
        right.claim(6, 0)


def test_a_driver_that_ends_in_good_order_frees_the_lock(tmp_path):
    with holder(tmp_path, 5) as process:
        process.stdin.close()
        until(lambda: not is_driven(tmp_path))
