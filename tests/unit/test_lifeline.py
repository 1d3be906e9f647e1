import os
import select
import signal

import pytest
from support.waiting import until

from protocol.ending import Ended
from protocol.lifeline import PARENT_VARIABLE, Lifeline


@pytest.fixture
def pipe():
    """Stands for standard input: (read end, function that closes the write end)."""
    reader, writer = os.pipe()
    left = [writer]
    yield reader, writer, lambda: os.close(left.pop())
    for fd in (reader, *left):
        os.close(fd)


def is_ready(lifeline):
    poller = select.poll()
    for fd in lifeline.fds:
        poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def test_nothing_ends_a_process_whose_parent_lives(pipe):
    with Lifeline(grace=1.0, stdin=pipe[0]) as lifeline:
        assert not is_ready(lifeline)
        assert not lifeline.ended()
        lifeline.check()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_wakes_the_loop_and_says_why(pipe, number):
    with Lifeline(grace=1.0, stdin=pipe[0]) as lifeline:
        os.kill(os.getpid(), number)
        until(lambda: is_ready(lifeline))
        assert lifeline.ended()
        assert signal.Signals(number).name in lifeline.reason
        assert not is_ready(lifeline)
        with pytest.raises(Ended, match="told to end"):
            lifeline.check()


def test_the_end_of_the_pipe_means_that_the_parent_is_gone(pipe):
    reader, _, close = pipe
    with Lifeline(grace=30.0, stdin=reader) as lifeline:
        close()
        assert is_ready(lifeline)
        assert lifeline.ended()
        assert "parent" in lifeline.reason


def test_what_is_written_into_the_pipe_is_no_end(pipe):
    reader, writer, close = pipe
    with Lifeline(grace=30.0, stdin=reader) as lifeline:
        os.write(writer, b"x" * 10_000)
        assert not lifeline.ended()
        assert not is_ready(lifeline)
        os.write(writer, b"y")
        close()
        assert lifeline.ended()


def test_a_pipe_that_cannot_be_read_counts_as_its_end(tmp_path):
    folder = os.open(tmp_path, os.O_RDONLY)
    with Lifeline(grace=30.0, stdin=folder) as lifeline:
        assert lifeline.ended()
    os.close(folder)


def test_a_parent_that_died_before_the_signal_was_set_is_noticed(pipe, monkeypatch):
    monkeypatch.setenv(PARENT_VARIABLE, str(os.getppid()))
    with Lifeline(grace=1.0, stdin=pipe[0]) as lifeline:
        assert not lifeline.ended()
    monkeypatch.setenv(PARENT_VARIABLE, str(os.getpid()))
    with Lifeline(grace=1.0, stdin=pipe[0]) as lifeline:
        assert lifeline.ended()


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    lifeline = Lifeline(grace=1.0)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert lifeline.fds == (0,)
    assert not lifeline.reason


def test_leaving_puts_the_handlers_back(pipe):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with Lifeline(grace=1.0, stdin=pipe[0]):
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] != before
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_the_guard_acts_and_kills_when_the_loop_does_not_come_back(pipe, monkeypatch):
    reader, _, close = pipe
    done = []
    monkeypatch.setattr(os, "kill", lambda pid, number: done.append((pid, number)))
    with Lifeline(grace=0.05, stdin=reader, last_act=lambda: done.append("last act")):
        close()
        until(lambda: len(done) == 2)
    assert done == ["last act", (os.getpid(), signal.SIGKILL)]


def test_going_on_after_a_stop_is_no_end_while_the_parent_lives(pipe):
    with Lifeline(grace=9.0, stdin=pipe[0]) as lifeline:
        os.kill(os.getpid(), signal.SIGCONT)
        assert not lifeline.ended()
        lifeline._parent = -1  # as after a death: another process is the parent now
        os.kill(os.getpid(), signal.SIGCONT)
        assert lifeline.ended()
        assert lifeline.reason == "the parent has died"
