"""Lines out of the collecting process: to a reader who is slow, gone, or does not read."""

import fcntl
import os
import signal
import threading

import msgspec
import pytest

from protocol.config import Deadlines
from protocol.ending import Ended, EndingSignals
from protocol.training import Answered, CollectLine
from target_daemon.collecting import lines
from target_daemon.collecting.lines import Out

LONG = Answered(id=3, tokens=tuple(range(40_000)), finish_reason="length")


@pytest.fixture
def pipe():
    """A pipe that holds a page."""
    ends = list(os.pipe())
    fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, 4096)
    yield ends
    for end in ends:
        os.close(end)


def test_a_line_longer_than_the_pipe_arrives_whole(pipe):
    reader, writer = pipe
    got = []

    def read():
        while not (got and got[-1].endswith(b"\n")):
            got.append(os.read(reader, 1 << 16))

    thread = threading.Thread(target=read)
    with EndingSignals() as endings:
        out = Out(writer, endings)
        thread.start()
        out.write(LONG)
    thread.join()
    assert msgspec.json.decode(b"".join(got), type=CollectLine) == LONG


def test_a_reader_who_is_gone_ends_it(pipe):
    with EndingSignals() as endings:
        os.close(pipe[0])
        pipe[0] = os.open(os.devnull, os.O_RDONLY)
        with pytest.raises(Ended, match="nobody reads"):
            Out(pipe[1], endings).write(LONG)


def test_a_reader_who_does_not_read_delays_an_end_no_longer_than_its_deadline(pipe, monkeypatch):
    monkeypatch.setattr(lines, "LOOK_MS", 5)
    monkeypatch.setattr(lines, "Deadlines", lambda: Deadlines(terminate=0.05))
    with EndingSignals() as endings:
        out = Out(pipe[1], endings)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Ended, match="told to end by SIGTERM"):
            out.write(LONG)
