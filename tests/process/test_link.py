"""Server and Link, the two halves of the control link, over real sockets of both kinds."""

import os
import signal
import socket
import stat
import sys
import time
from contextlib import contextmanager

import pytest
from support import counting_daemon
from support.children import events_until
from support.waiting import until

from launch.process import Child, Exited
from protocol import server as server_module
from protocol.addresses import TcpAddress, parse_tcp
from protocol.client import MAX_OUTBOX, Poller
from protocol.codec import encode
from protocol.config import Deadlines, TargetConfig, write_config
from protocol.errors import ConfigError, InternalError, Overloaded, ProtocolError
from protocol.lifeline import Lifeline
from protocol.listening import Network
from protocol.messages import (
    WIRE_VERSION,
    Close,
    Closed,
    ClosedItem,
    CloseItem,
    Failed,
    Hello,
    Open,
    Opened,
    OpenItem,
    TargetHello,
)
from protocol.right import Given
from protocol.run_directory import RunDirectory
from protocol.server import Server, serve
from protocol.state import DRAFT_REQUESTS, TARGET_REPLIES, TARGET_REQUESTS
from protocol.status import Ready

pytestmark = pytest.mark.process

LIFE = 11
HELLO = Hello(target_life=LIFE, draft_life=0, wire_version=WIRE_VERSION, nonce=5)
CLOSE = Close(target_life=LIFE, items=(CloseItem(sequence=1),))
CLOSED = Closed(target_life=LIFE, results=())


class Place:
    """Somewhere to listen, of one kind; `address` is where a link finds it."""

    def __init__(self, kind, runtime_dir):
        self.kind = kind
        self.path = runtime_dir / "t.sock"
        self.listens, self.address = self.path, f"ipc://{self.path}"
        if kind == "tcp":
            with target_server(Network(TcpAddress("127.0.0.1", 0))) as server:
                self.address = server.endpoint
            self.listens = Network(parse_tcp(self.address))


@pytest.fixture
def path(runtime_dir):
    return runtime_dir / "t.sock"


@pytest.fixture(params=["ipc", "tcp"])
def place(request, runtime_dir):
    return Place(request.param, runtime_dir)


def target_server(listens, **changes):
    return Server(listens, TARGET_REQUESTS, **{"link": "target", "right": Given(LIFE), **changes})


@contextmanager
def linked(place):
    with Poller() as poller, target_server(place.listens) as server:
        yield poller, server, poller.connect(place.address, TARGET_REPLIES)


def received(poller, server):
    """The next legal message; everything else that comes is answered on the way."""

    def look():
        poller.poll(0.0)  # sends what waits for the connection
        server.poll((), 0.01)
        return server.receive()

    return until(look, what="a message")


def replies(poller, link, count=1, *, server=None):
    """`count` replies, with the server's own answers given meanwhile."""
    found = []

    def look():
        if server is not None:
            server.poll((), 0.0)
            assert server.receive() is None
        if link in poller.poll(0.01):
            found.extend(link.receive())
        return len(found) >= count

    until(look, what="a reply")
    return found


def test_a_message_and_its_reply_cross_the_link(place):
    with linked(place) as (poller, server, link):
        link.send(HELLO)
        hello = received(poller, server)
        assert hello.message == HELLO
        link.send(CLOSE)
        got = received(poller, server)
        assert got.message == CLOSE
        assert got.peer == hello.peer
        server.reply(got.peer, CLOSED)
        assert replies(poller, link) == [CLOSED]
        assert poller.poll(0.0) == []


def test_the_socket_is_private_and_its_file_is_gone_afterwards(path):
    before = os.umask(0)
    try:
        with target_server(path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert not path.exists()
        assert os.umask(0) == 0
    finally:
        os.umask(before)


def test_what_was_sent_before_the_daemon_bound_arrives_in_order(place):
    with Poller() as poller:
        link = poller.connect(place.address, TARGET_REPLIES)
        link.send(HELLO)
        link.send(CLOSE)
        assert poller.poll(0.05) == []
        with target_server(place.listens) as server:
            assert received(poller, server).message == HELLO
            assert received(poller, server).message == CLOSE
            link.send(CLOSE)
            assert received(poller, server).message == CLOSE


def test_a_queue_that_is_full_is_an_error_and_does_not_block(place):
    with Poller() as poller:
        link = poller.connect(place.address, TARGET_REPLIES)
        for _ in range(MAX_OUTBOX):
            link.send(CLOSE)
        with pytest.raises(Overloaded, match=str(MAX_OUTBOX)):
            link.send(CLOSE)


def test_a_message_before_hello_is_refused(place):
    with linked(place) as (poller, server, link):
        link.send(CLOSE)
        [failed] = replies(poller, link, server=server)
        assert (failed.code, failed.target_life) == ("protocol", LIFE)
        assert "before Hello" in failed.detail
        assert server.counts.illegal == 1


def test_another_wire_version_is_refused_with_both(place):
    with linked(place) as (poller, server, link):
        link.send(Hello(target_life=LIFE, wire_version=WIRE_VERSION + 7, nonce=5))
        [failed] = replies(poller, link, server=server)
        assert failed.code == "wire_mismatch"
        assert f"version {WIRE_VERSION}" in failed.detail
        assert str(WIRE_VERSION + 7) in failed.detail


def test_a_message_of_another_life_is_refused_as_stale(place):
    with linked(place) as (poller, server, link):
        link.send(HELLO)
        received(poller, server)
        link.send(Close(target_life=LIFE - 1, draft_life=3, items=CLOSE.items))
        [failed] = replies(poller, link, server=server)
        assert (failed.code, failed.target_life, failed.draft_life) == ("stale", LIFE - 1, 3)
        assert server.counts.stale == 1


def test_the_draft_looks_at_its_own_life(path):
    with (
        Poller() as poller,
        Server(path, DRAFT_REQUESTS, link="draft", right=Given(LIFE)) as server,
    ):
        link = poller.connect(f"ipc://{path}", TARGET_REPLIES)
        link.send(Hello(target_life=1, draft_life=LIFE, wire_version=WIRE_VERSION, nonce=5))
        assert received(poller, server).message.draft_life == LIFE
        link.end.send(b"\xc1")
        [failed] = replies(poller, link, server=server)
        assert (failed.target_life, failed.draft_life) == (0, LIFE)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"GET / HTTP/1.1",
        encode(CLOSED),
        encode(HELLO) + b"more",
        b"\x91" * 5000,
    ],
)
def test_what_is_malformed_is_counted_and_answered_and_the_next_message_is_served(place, data):
    with linked(place) as (poller, server, link):
        link.send(HELLO)
        received(poller, server)
        link.end.send(data)
        [failed] = replies(poller, link, server=server)
        assert isinstance(failed, Failed)
        assert (failed.code, failed.target_life) == ("protocol", LIFE)
        assert server.counts.malformed == 1
        link.send(CLOSE)
        assert received(poller, server).message == CLOSE


def test_a_foreign_program_on_the_socket_disturbs_nobody(place):
    family = socket.AF_UNIX if place.kind == "ipc" else socket.AF_INET
    stranger = socket.socket(family, socket.SOCK_STREAM)
    with linked(place) as (poller, server, link), stranger:
        there = parse_tcp(place.address) if place.kind == "tcp" else None
        stranger.connect(str(place.path) if there is None else (there.host, there.port))
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        link.send(HELLO)
        assert received(poller, server).message == HELLO


def test_a_malformed_reply_is_an_event(place):
    with linked(place) as (poller, server, link):
        link.send(HELLO)
        peer = received(poller, server).peer
        for data in (b"\xc1", encode(HELLO), b""):
            assert server._end.send(peer, data) == ""
        server.reply(peer, CLOSED)
        *bad, good = replies(poller, link, 4)
        assert [type(event) for event in bad] == [ProtocolError] * 3
        assert good == CLOSED


def test_a_reply_that_cannot_be_encoded_becomes_an_internal_failure(place):
    with linked(place) as (poller, server, link):
        link.send(HELLO)
        peer = received(poller, server).peer
        server.reply(
            peer, Closed(target_life=LIFE, results=(ClosedItem(sequence=1, committed=2**70),))
        )
        [failed] = replies(poller, link)
        assert failed.code == "internal"


def test_a_reply_to_a_peer_that_is_gone_is_counted(place):
    with Poller() as poller, target_server(place.listens) as server:
        link = poller.connect(place.address, TARGET_REPLIES)
        link.send(HELLO)
        peer = received(poller, server).peer
        link.close()
        link.close()

        def look():
            server.poll((), 0.01)
            server.receive()
            server.reply(peer, CLOSED)
            return server.counts.undelivered

        until(look)
        server.reply(b"nobody", CLOSED)
        assert poller.poll(0.0) == []


def test_the_poller_takes_plain_descriptors_beside_links(place):
    reader, writer = os.pipe()
    with linked(place) as (poller, server, link):
        poller.add(reader)
        assert poller.poll(0.0) == []
        os.write(writer, b"x")
        assert poller.poll(1.0) == [reader]
        assert poller.poll(1.0) == [reader]  # not read yet: still reported
        os.read(reader, 1)
        assert poller.poll(0.0) == []
        poller.add(writer, write=True)
        assert poller.poll(1.0) == [writer]
        poller.remove(writer)
        os.close(writer)
        assert poller.poll(1.0) == [reader]  # the end of the pipe
        poller.remove(reader)
        link.send(HELLO)
        server.reply(received(poller, server).peer, CLOSED)
        until(lambda: poller.poll(0.01) == [link])
        assert poller.poll(1.0) == [link]
        assert link.receive() == [CLOSED]
    os.close(reader)


def test_a_poll_ends_at_its_deadline():
    with Poller() as poller:
        start = time.monotonic()
        assert poller.poll(0.0301) == []
        assert 0.03 <= time.monotonic() - start < 1.0
        with pytest.raises(InternalError):
            poller.poll(None)


def test_many_replies_come_in_turns(place):
    with linked(place) as (poller, server, link):
        link.send(HELLO)
        peer = received(poller, server).peer
        sent = 30
        got = []
        for _ in range(sent // 3):
            for _ in range(3):
                server.reply(peer, CLOSED)
            got += replies(poller, link, 3)
        assert got == [CLOSED] * sent


def test_the_server_polls_descriptors_that_come_and_go(path):
    reader, writer = os.pipe()
    with target_server(path) as server:
        assert server.poll((reader,), 0.0) == frozenset()
        os.write(writer, b"x")
        assert server.poll((reader,), 1.0) == {reader}
        assert server.poll((), 0.0) == frozenset()
    os.close(reader)
    os.close(writer)


def test_old_peers_are_forgotten_first(place, monkeypatch):
    monkeypatch.setattr(server_module, "MAX_PEERS", 1)
    with linked(place) as (poller, server, link):
        link.send(HELLO)
        received(poller, server)
        other = poller.connect(place.address, TARGET_REPLIES)
        other.send(HELLO)
        received(poller, server)
        link.send(CLOSE)
        [failed] = replies(poller, link, server=server)
        assert "before Hello" in failed.detail


def test_a_path_that_is_too_long_is_refused_with_both_numbers(runtime_dir):
    path = runtime_dir / ("x" * 107)
    with pytest.raises(ConfigError, match=r"bytes.*107"), target_server(path):
        pass


def test_a_folder_that_is_not_there_is_a_config_error(runtime_dir):
    with pytest.raises(ConfigError, match="cannot listen"), target_server(runtime_dir / "no" / "s"):
        pass


def test_using_an_end_that_is_not_open_is_a_defect(path):
    with pytest.raises(InternalError):
        target_server(path).receive()
    with pytest.raises(InternalError):
        Poller().connect(f"ipc://{path}", TARGET_REPLIES)


def test_an_address_that_is_none_is_refused():
    with Poller() as poller, pytest.raises(ProtocolError, match="nonsense"):
        poller.connect("nonsense://x", TARGET_REPLIES)


def test_the_loop_calls_what_belongs_to_a_descriptor_and_ends_when_told(path):
    stdin, parent = os.pipe()
    reader, writer = os.pipe()
    called = []

    def on_readable():
        called.append(os.read(reader, 1))
        if len(called) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    os.write(writer, b"ab")
    with Lifeline(grace=30.0, stdin=stdin) as lifeline, target_server(path) as server:
        os.write(parent, b"no end")  # wakes the loop, and means nothing
        serve(server, lambda message: CLOSED, extra={reader: on_readable}, lifeline=lifeline)
    assert called == [b"a", b"b"]
    for fd in (stdin, parent, reader, writer):
        os.close(fd)


def test_a_peer_that_does_not_read_loses_replies_and_the_daemon_does_not_block(place):
    with linked(place) as (poller, server, link):
        link.send(HELLO)
        peer = received(poller, server).peer
        big = Failed(target_life=LIFE, code="internal", detail="x" * 16000)
        for _ in range(2000 if place.kind == "ipc" else 8000):
            server.reply(peer, big)
        assert server.counts.undelivered > 0


# --- with a daemon in a process of its own -----------------------------------------------------


@contextmanager
def daemon(problem):
    """A real daemon with `problem`, and a link to it: (child, poller, link)."""
    with RunDirectory() as run:
        config = run.path / "target.json"
        write_config(TargetConfig(model=problem, run_dir=str(run.path), life=LIFE), config)
        command = (sys.executable, "-I", counting_daemon.__file__, str(config))
        with Child(command, deadlines=Deadlines(terminate=5.0)) as child, Poller() as poller:
            address = f"ipc://{run.path}/target.sock"
            yield child, poller, poller.connect(address, TARGET_REPLIES)


def test_a_daemon_loads_meets_serves_and_ends_when_told():
    with daemon("serve") as (child, poller, link):
        link.send(HELLO)  # before it has bound
        [hello] = replies(poller, link)
        assert isinstance(hello, TargetHello)
        assert (hello.nonce, hello.host.pid) == (HELLO.nonce, child.pid)
        link.send(HELLO)
        assert replies(poller, link) == [hello]
        link.send(Open(target_life=LIFE, items=(OpenItem(sequence=1), OpenItem(sequence=2))))
        [opened] = replies(poller, link)
        assert isinstance(opened, Opened)
        items = tuple(CloseItem(sequence=number) for number in (1, 666, 3))
        link.send(Close(target_life=LIFE, items=items))
        [closed] = replies(poller, link)
        codes = [getattr(result, "code", "closed") for result in closed.results]
        assert codes == ["closed", "internal", "unknown_sequence"]
        assert "secret" not in str(closed)
        child.terminate()
        exited = events_until(child, Exited)[-1]
        assert (exited.code, exited.signal) == (0, "")
        assert "ZeroDivisionError: secret" in exited.log
        assert "SIGTERM" in exited.log


def test_a_stopped_daemon_answers_when_it_goes_on():
    with daemon("serve") as (child, poller, link):
        link.send(HELLO)
        replies(poller, link)
        os.kill(child.pid, signal.SIGSTOP)
        link.send(HELLO)
        assert poller.poll(0.1) == []
        os.kill(child.pid, signal.SIGCONT)
        assert isinstance(replies(poller, link)[0], TargetHello)


def test_nothing_meant_for_a_dead_daemon_reaches_the_next_one():
    with daemon("serve") as (child, poller, link):
        link.send(HELLO)
        replies(poller, link)
        child.kill()
        events_until(child, Exited)
        until(lambda: _is_queued(link))
        link.close()
        assert poller.poll(0.0) == []


def _is_queued(link):
    link.send(HELLO)
    return bool(link._outbox)


def test_a_daemon_that_hangs_is_killed_by_its_deadline():
    with daemon("hang") as (child, poller, link):
        events_until(child, Ready)
        link.send(HELLO)
        replies(poller, link)
        link.send(Open(target_life=LIFE, items=(OpenItem(sequence=1),)))
        assert poller.poll(0.1) == []
        child.kill()
        assert events_until(child, Exited)[-1].signal == "SIGKILL"
