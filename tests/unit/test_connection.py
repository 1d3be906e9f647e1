"""A client's connection: whole messages in order, an end that is seen, and bounded queues."""

import itertools
import os
import resource
import socket
import stat
import struct

import pytest
from support.waiting import until

from protocol import connection as module
from protocol.codec import MAX_MESSAGE_BYTES, encode
from protocol.connection import Connection, accept, connect, listen
from protocol.errors import ConfigError, PermissionRefused, ProtocolError, Unavailable
from protocol.messages import Cancel, Status
from protocol.state import CLIENT_REPLIES, CLIENT_REQUESTS


@pytest.fixture
def ends():
    one, other = socket.socketpair()
    near, far = Connection(one, CLIENT_REQUESTS), Connection(other, CLIENT_REQUESTS)
    yield near, far
    near.close()
    far.close()


@pytest.fixture
def raw():
    one, other = socket.socketpair()
    near = Connection(one, CLIENT_REQUESTS)
    yield near, other
    near.close()
    other.close()


def frame(message):
    data = encode(message)
    return struct.pack("<I", len(data)) + data


def test_messages_come_whole_and_in_order_however_they_are_cut(raw):
    near, other = raw
    data = frame(Cancel(request=1)) + frame(Cancel(request=2)) + frame(Status())
    found = []
    for index in range(len(data)):
        other.send(data[index : index + 1])
        found += near.receive()
    assert found == [Cancel(request=1), Cancel(request=2), Status()]
    other.send(data)
    assert near.receive() == found


def test_what_is_not_taken_at_once_goes_out_later_and_in_order(ends):
    near, far = ends
    sent = [Cancel(request=number) for number in range(20_000)]
    for message in sent:
        near.send(message)
    assert near.has_unsent
    found = []

    def moved():
        near.flush()
        found.extend(far.receive())
        return len(found) == len(sent)

    until(moved)
    assert found == sent
    assert not near.has_unsent


def test_a_queue_that_nobody_reads_is_full(ends, monkeypatch):
    monkeypatch.setattr(module, "MAX_OUTBOX_BYTES", 1000)
    near, _ = ends
    sent = 0
    while not near.is_full:
        near.send(Cancel(request=sent))
        sent += 1
        assert sent < 1_000_000
    near.drain(0.01)
    assert near.has_unsent


def test_the_last_word_is_waited_for(ends):
    near, far = ends
    for number in range(50):
        near.send(Cancel(request=number))
    near.drain(1.0)
    assert len(far.receive()) == 50


def test_messages_before_the_end_are_read_and_the_end_is_seen(ends):
    near, far = ends
    far.send(Status())
    far.close()
    assert near.receive() == [Status()]
    assert near.receive() == []
    assert near.ended
    near.send(Status())
    near.drain(1.0)  # ends at once, since nobody takes it


def test_writing_to_an_end_that_is_gone_is_no_error(ends):
    near, far = ends
    far.close()
    near.send(Status())
    assert near.ended


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", MAX_MESSAGE_BYTES + 1),
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
        struct.pack("<I", 0),
        struct.pack("<I", 1) + b"\x90",
    ],
    ids=["too long", "no MessagePack", "empty", "no map"],
)
def test_what_is_no_message_is_a_protocol_error(raw, data):
    near, other = raw
    other.send(data)
    with pytest.raises(ProtocolError):
        near.receive()


def test_a_message_that_does_not_belong_on_this_end_is_refused(raw):
    near, other = raw
    far = Connection(other, CLIENT_REPLIES)
    near.send(Status())
    with pytest.raises(ProtocolError):
        far.receive()


def test_the_socket_is_this_users_alone_and_replaces_what_a_dead_one_left(runtime_dir):
    path = runtime_dir / "c.sock"
    for _ in range(2):
        listener = listen(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        listener.close()
    path.unlink()
    with pytest.raises(ConfigError):
        listen(runtime_dir / "nothing" / "c.sock")


def test_a_socket_that_can_be_found_listens(runtime_dir, monkeypatch):
    path = runtime_dir / "c.sock"
    found = []

    class Listener(socket.socket):
        def listen(self, *backlog):
            found.append(path.exists())
            super().listen(*backlog)

    monkeypatch.setattr(socket, "socket", Listener)
    with listen(path):
        monkeypatch.undo()
        connect(path, CLIENT_REPLIES).close()
        assert found == [False]
        assert [one.name for one in runtime_dir.iterdir()] == ["c.sock"]
    path.unlink()


def test_both_ends_check_who_the_other_is(runtime_dir, monkeypatch):
    path = runtime_dir / "c.sock"
    with listen(path) as listener:
        assert accept(listener, CLIENT_REQUESTS) is None
        mine = connect(path, CLIENT_REPLIES)
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(PermissionRefused):
            accept(listener, CLIENT_REQUESTS)
        with pytest.raises(PermissionRefused):
            connect(path, CLIENT_REPLIES)
        mine.close()
    path.unlink()


def test_without_a_descriptor_for_it_nobody_is_taken_in(runtime_dir):
    path = runtime_dir / "c.sock"
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with listen(path) as listener:
        mine = connect(path, CLIENT_REPLIES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (mine.fd, before[1]))
        try:
            assert accept(listener, CLIENT_REQUESTS) is None
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        taken = accept(listener, CLIENT_REQUESTS)
        assert taken is not None
        taken.close()
        mine.close()
    path.unlink()


def test_nobody_at_the_socket_is_unavailable(runtime_dir):
    path = runtime_dir / "c.sock"
    with pytest.raises(Unavailable, match="no supervisor"):
        connect(path, CLIENT_REPLIES)
    listen(path).close()
    with pytest.raises(Unavailable):
        connect(path, CLIENT_REPLIES)
    path.unlink()
    with listen(path) as listener:
        held = []
        # It does not take anybody, and is not waited for either.
        fill = (held.append(connect(path, CLIENT_REPLIES)) for _ in itertools.count())
        with pytest.raises(Unavailable):
            list(fill)
        for one in held:
            one.close()
        del listener
    path.unlink()
