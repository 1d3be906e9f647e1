"""A control link on one host: who may connect, what is kept, and what an end of a side does."""

import os
import select
import socket
import struct
import time

import pytest
from support.waiting import until

from protocol import local_ends
from protocol.codec import MAX_MESSAGE_BYTES
from protocol.errors import ConfigError, PermissionRefused, ProtocolError
from protocol.link_settings import HIGH_WATER_MARK
from protocol.local_ends import LocalCaller, LocalListener


class Watched:
    """The loop of one end: which descriptors it watches, and for what."""

    def __init__(self):
        self.events = {}

    def __call__(self, fd, events):
        if events:
            self.events[fd] = events
        else:
            del self.events[fd]

    def ready(self):
        poller = select.poll()
        for fd, events in self.events.items():
            poller.register(fd, events)
        return poller.poll(0)


@pytest.fixture
def path(runtime_dir):
    return runtime_dir / "t.sock"


@pytest.fixture
def listener(path):
    watched = Watched()
    listener = LocalListener(path, watched)
    listener.watched = watched
    yield listener
    listener.close()
    assert watched.events == {}
    assert not path.exists()


@pytest.fixture
def caller(path):
    watched = Watched()
    caller = LocalCaller(path, watched)
    caller.watched = watched
    yield caller
    caller.close()
    caller.close()
    assert watched.events == {}


def turn(listener):
    for fd, events in listener.watched.ready():
        listener.attend(fd, events)


def taken(listener):
    """The next message, once it is there."""

    def look():
        if not listener.has_message():
            turn(listener)
        return listener.receive()

    return until(look, what="a message")


def answers(caller):
    return until(caller.receive, what="a reply")


def test_messages_and_replies_cross_and_a_peer_keeps_its_name(listener, caller):
    assert caller.send(b"one")
    assert caller.send(b"")
    assert caller.is_steady
    name, role, data = taken(listener)
    assert (role, data) == (None, b"one")
    assert taken(listener) == (name, None, b"")
    assert listener.send(name, b"reply") == ""
    assert answers(caller) == [b"reply"]
    assert listener.receive() is None


def test_two_peers_have_two_names_and_both_are_read(listener, caller, path):
    other = LocalCaller(path, Watched())
    caller.send(b"a")
    other.send(b"b")
    first, second = taken(listener), taken(listener)
    assert {first[2], second[2]} == {b"a", b"b"}
    assert first[0] != second[0]
    other.close()


def test_who_is_not_there_is_looked_for_again_and_more_rarely(caller, path):
    assert not caller.send(b"early")
    waits = []
    for _ in range(6):
        caller._retry_at = 0.0
        waits.append(caller.prepare())
    caller._retry_at = time.monotonic() + 1000
    assert caller.prepare() > 500
    assert waits == sorted(waits)
    assert waits[-1] <= local_ends.LOCAL_RECONNECT_MAX_SECONDS
    listener = LocalListener(path, Watched())
    caller._retry_at = 0.0
    assert caller.prepare() == 0.0
    assert caller.prepare() is None
    assert caller.trouble is None
    listener.close()


def test_a_daemon_that_ends_is_seen_and_the_next_one_is_found(caller, path):
    watched = Watched()
    for message in (b"first life", b"second life"):
        listener = LocalListener(path, watched)
        listener.watched = watched
        assert caller.send(message)
        name, _, data = taken(listener)
        assert data == message
        listener.send(name, b"last word")
        listener.close()
        assert not caller.send(b"to nobody")
        assert answers(caller) == [b"last word"]  # what came before the end is read
        assert caller.receive() == []
        assert not caller.is_steady


def test_a_peer_that_ends_leaves_nothing_and_is_told_apart_from_the_next(listener, caller, path):
    caller.send(b"a")
    name, _, _ = taken(listener)
    caller.close()
    until(lambda: turn(listener) or len(listener.watched.events) == 1)
    assert "gone" in listener.send(name, b"reply")
    again = LocalCaller(path, Watched())
    again.send(b"b")
    assert taken(listener)[0] != name
    again.close()


def test_a_reply_to_a_peer_that_has_just_gone_is_not_queued(listener, caller):
    caller.send(b"a")
    name, _, _ = taken(listener)
    caller.close()
    assert "gone" in listener.send(name, b"reply")


def test_a_peer_that_does_not_read_has_a_bounded_queue_and_gets_all_that_was_taken(
    listener, caller
):
    caller.send(b"a")
    name, _, _ = taken(listener)
    sent = 0
    while not (lost := listener.send(name, b"%d" % sent + b"x" * 10_000)):
        sent += 1
        assert sent < 10_000
    assert str(HIGH_WATER_MARK) in lost
    got = []

    def read():
        turn(listener)
        got.extend(caller.receive())
        return len(got) == sent

    until(read)
    assert [int(data.partition(b"x")[0]) for data in got] == list(range(sent))
    assert all(events == select.POLLIN for events in listener.watched.events.values())


def test_a_message_larger_than_the_socket_takes_goes_out_in_parts(listener, caller):
    large = os.urandom(1 << 20)
    assert caller.send(large)
    assert not caller.send(b"next")
    caller.want_write(wanted=True)

    def moved():
        if caller.watched.ready():
            caller.flush()
        turn(listener)
        return listener.receive()

    assert until(moved)[2] == large
    assert caller.flush()
    assert caller.send(b"next")
    assert taken(listener)[2] == b"next"


def test_last_replies_are_waited_for(path):
    watched = Watched()
    listener, caller = LocalListener(path, watched), LocalCaller(path, Watched())
    listener.watched = watched
    caller.send(b"a")
    name, _, _ = taken(listener)
    large = b"x" * (1 << 20)
    listener.send(name, large)
    listener.close()  # nobody reads: it waits for a moment, and no longer
    caller.close()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", struct.pack("<I", MAX_MESSAGE_BYTES + 1)])
def test_what_is_no_frame_ends_the_connection_and_disturbs_nobody(listener, caller, path, data):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(str(path))
        stranger.sendall(data)
        name, _, error = taken(listener)
        assert isinstance(error, ProtocolError)
        assert "gone" in listener.send(name, b"refused")
        assert stranger.recv(1) == b""
    caller.send(b"good")
    assert taken(listener)[2] == b"good"


def test_a_daemon_that_sends_no_frames_is_a_protocol_error(caller, path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as daemon:
        daemon.bind(str(path))
        daemon.listen()
        caller.send(b"a")
        end, _ = daemon.accept()
        with end:
            end.sendall(b"\xff" * 8)
            [error] = answers(caller)
        assert isinstance(error, ProtocolError)
        assert not caller.is_steady
    path.unlink()


def test_both_ends_check_who_the_other_is(listener, path, monkeypatch, caplog):
    mine = LocalCaller(path, Watched())
    mine.send(b"a")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    turn(listener)
    assert len(listener.watched.events) == 1
    assert "refused a connection" in caplog.text
    foreign = LocalCaller(path, Watched())
    assert foreign.prepare() == 0.0
    assert isinstance(foreign.broken, PermissionRefused)
    assert foreign.has_news
    assert foreign.is_steady  # it is not tried again
    assert not foreign.send(b"a")
    for one in (mine, foreign):
        one.close()


def test_connections_are_bounded_and_a_silent_one_makes_room(listener, path, monkeypatch):
    monkeypatch.setattr(local_ends, "MAX_CONNECTIONS", 2)
    callers = [LocalCaller(path, Watched()) for _ in range(4)]
    callers[0].send(b"speaks")
    first, _, _ = taken(listener)
    for silent in callers[1:3]:
        silent.prepare()
        turn(listener)
    callers[3].send(b"speaks too")
    assert taken(listener)[2] == b"speaks too"
    assert listener.send(first, b"still here") == ""
    assert len(listener.watched.events) == 3
    for one in callers:
        one.close()


def test_one_that_went_before_it_was_taken_in_is_no_error(listener, path):
    for fd in listener.watched.events:
        listener.attend(fd, select.POLLIN)  # nobody is there
    assert len(listener.watched.events) == 1


def test_a_path_that_cannot_be_bound_is_a_config_error(runtime_dir):
    file = runtime_dir / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="cannot listen at"):
        LocalListener(file / "t.sock", Watched())
    file.unlink()


def test_an_end_without_a_connection_has_nothing_to_give(caller):
    assert caller.receive() == []
    assert not caller.flush()
    caller.want_write(wanted=True)
    assert not caller.has_news
