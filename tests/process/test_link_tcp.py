"""Server and Link over a network: who is admitted, who is refused, and by what name."""

from contextlib import contextmanager

import pytest
import zmq
from support.keys import PAIRS, keyring, stranger, write_keys
from support.waiting import until

from protocol import monitor as monitor_module
from protocol import sockets as sockets_module
from protocol.addresses import TcpAddress, parse_tcp
from protocol.client import Poller
from protocol.codec import MAX_MESSAGE_BYTES, encode
from protocol.errors import ConfigError, PermissionRefused, ProtocolError, Unavailable
from protocol.gate import Gate, judge
from protocol.keyring import Keyring, read_keyring
from protocol.listening import Network
from protocol.messages import WIRE_VERSION, Close, Closed, CloseItem, Failed, Hello
from protocol.right import Given
from protocol.server import Server
from protocol.sockets import ZAP_DOMAIN
from protocol.state import DRAFT_REPLIES, DRAFT_REQUESTS, TARGET_REPLIES, TARGET_REQUESTS

pytestmark = pytest.mark.process

LIFE = 11
HELLO = Hello(target_life=LIFE, draft_life=0, wire_version=WIRE_VERSION, nonce=5)
CLOSE = Close(target_life=LIFE, items=(CloseItem(sequence=1),))
CLOSED = Closed(target_life=LIFE, results=())
LOOPBACK = TcpAddress("127.0.0.1", 0)


@contextmanager
def listening(ring=None, *, address=LOOPBACK):
    with Server(
        Network(address, ring), TARGET_REQUESTS, link="target", right=Given(LIFE)
    ) as server:
        yield server


@contextmanager
def linked(server, ring=None, *, role="target"):
    with Poller() as poller:
        yield poller, poller.connect(server.endpoint, TARGET_REPLIES, role=role, keyring=ring)


def received(poller, server):
    def look():
        poller.poll(0.0)
        server.poll((), 0.01)
        return server.receive()

    return until(look, what="a message")


def reply(poller, link, server):
    def look():
        server.poll((), 0.0)
        assert server.receive() is None
        return link.receive() if link in poller.poll(0.01) else None

    return until(look, what="a reply")


def trouble(poller, link, server, kind):
    """Turn both loops until the link says that it is of this kind."""

    def look():
        poller.poll(0.0)
        server.poll((), 0.01)
        assert server.receive() is None
        return link.trouble if isinstance(link.trouble, kind) else None

    return until(look, what=f"a link in trouble: {kind.__name__}")


def test_the_sockets_have_the_settings_of_the_design():
    with listening() as server, linked(server) as (_, link):
        for socket in (server._end._socket, link.end._socket):
            assert socket.getsockopt(zmq.LINGER) == 0
            assert socket.getsockopt(zmq.SNDHWM) == socket.getsockopt(zmq.RCVHWM) == 64
            assert socket.getsockopt(zmq.MAXMSGSIZE) == MAX_MESSAGE_BYTES
            assert socket.getsockopt(zmq.HEARTBEAT_IVL) == 1000


def test_what_has_more_than_one_frame_is_malformed_on_both_sides():
    with listening() as server, linked(server) as (poller, link):
        link.send(HELLO)
        peer = received(poller, server).peer
        link.end._socket.send_multipart([encode(HELLO), b"more"])
        (answer,) = reply(poller, link, server)
        assert (answer.code, server.counts.malformed) == (ProtocolError.code, 1)
        server._end._socket.send_multipart([peer, b"a", b"b"])
        (error,) = reply(poller, link, server)
        assert isinstance(error, ProtocolError)
        assert "2 frames" in str(error)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("secured", [False, True])
def test_a_message_and_its_reply_cross_a_network(host, secured):
    ours = keyring("target") if secured else None
    theirs = keyring("supervisor") if secured else None
    with (
        listening(ours, address=TcpAddress(host, 0)) as server,
        linked(server, theirs) as (poller, link),
    ):
        link.send(HELLO)
        got = received(poller, server)
        assert got.message == HELLO
        assert link.trouble is None
        server.reply(got.peer, CLOSED)
        assert reply(poller, link, server) == [CLOSED]
        assert link.moved_bytes == len(encode(HELLO)) + len(encode(CLOSED))


def test_a_link_says_why_nothing_answers_and_finds_the_daemon_once_it_listens():
    with listening() as server:
        address = parse_tcp(server.endpoint)
    with Poller() as poller:
        link = poller.connect(str(address), TARGET_REPLIES)
        link.send(HELLO)

        def unreachable():
            poller.poll(0.01)
            return "cannot be reached" in str(link.trouble)

        until(unreachable, what="a failed connection")
        assert isinstance(link.trouble, Unavailable)
        with listening(address=address) as server:
            assert received(poller, server).message == HELLO
            assert link.trouble is None


def test_an_unknown_key_is_refused_by_name_and_counted(caplog):
    with listening(keyring("target")) as server, linked(server, stranger()) as (poller, link):
        link.send(HELLO)
        error = trouble(poller, link, server, PermissionRefused)
        assert "does not admit this process's key" in str(error)
        assert server._end.gate.refused >= 1
        assert "refused an unknown key from 127.0.0.1" in caplog.text


def test_a_key_of_a_role_that_has_nothing_to_say_here_is_not_admitted():
    place = Network(LOOPBACK, keyring("draft"))
    assert place.admitted("draft") == {PAIRS["supervisor"].public: "supervisor"}
    with (
        Server(place, DRAFT_REQUESTS, link="draft", right=Given(LIFE)) as server,
        Poller() as poller,
    ):
        link = poller.connect(
            server.endpoint, DRAFT_REPLIES, role="draft", keyring=keyring("target")
        )
        link.send(HELLO)
        trouble(poller, link, server, PermissionRefused)


def test_a_daemon_with_another_key_than_was_told_is_refused_by_the_supervisor():
    wrong = keyring("supervisor", target=stranger().own)
    with listening(keyring("target")) as server, linked(server, wrong) as (poller, link):
        link.send(HELLO)
        assert "another key" in str(trouble(poller, link, server, PermissionRefused))


def test_a_client_without_keys_gets_nothing_from_a_daemon_with_keys():
    with listening(keyring("target")) as server, linked(server) as (poller, link):
        link.send(HELLO)
        assert "only one of the two" in str(trouble(poller, link, server, PermissionRefused))


def test_a_client_with_keys_does_not_talk_to_a_daemon_without():
    with listening() as server, linked(server, keyring("supervisor")) as (poller, link):
        link.send(HELLO)
        assert "only one of the two" in str(trouble(poller, link, server, PermissionRefused))


def test_a_daemon_that_loads_for_longer_than_handshakes_take_is_not_taken_for_a_stranger(
    monkeypatch,
):
    monkeypatch.setitem(sockets_module._NETWORK, zmq.HANDSHAKE_IVL, 300)
    monkeypatch.setattr(monitor_module, "PROMPT_SECONDS", 0.15)
    failed = []
    take = monitor_module.Monitor._take

    def count(monitor, event):
        failed.append(event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
        take(monitor, event)

    monkeypatch.setattr(monitor_module.Monitor, "_take", count)
    with (
        listening(keyring("target")) as server,
        linked(server, keyring("supervisor")) as (poller, link),
    ):
        link.send(HELLO)

        def loading():  # nobody looks at the server's sockets meanwhile
            poller.poll(0.02)
            assert not isinstance(link.trouble, PermissionRefused)
            return sum(failed) > monitor_module.HANDSHAKES

        until(loading, seconds=60, what="handshakes that were not answered")
        assert received(poller, server).message == HELLO
        assert link.trouble is None


def test_a_good_peer_is_served_beside_those_that_are_refused():
    with (
        listening(keyring("target")) as server,
        linked(server, stranger()) as (poller, bad),
        linked(server, keyring("supervisor")) as (other, good),
    ):
        bad.send(HELLO)
        good.send(HELLO)
        assert received(other, server).message == HELLO
        trouble(poller, bad, server, PermissionRefused)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "host.example"])
def test_without_keys_nothing_listens_or_connects_off_loopback(host):
    address = TcpAddress(host, 7000)
    server = Server(Network(address), TARGET_REQUESTS, link="target", right=Given(LIFE))
    with pytest.raises(ConfigError, match="keys are needed to listen") as error:
        server.__enter__()
    assert str(address) in str(error.value)
    with Poller() as poller, pytest.raises(ConfigError, match="keys are needed to connect"):
        poller.connect(str(address), TARGET_REPLIES)


def test_a_list_without_anybody_is_refused():
    nobody = Keyring(PAIRS["target"])
    server = Server(Network(LOOPBACK, nobody), TARGET_REQUESTS, link="target", right=Given(LIFE))
    with pytest.raises(ConfigError, match="nobody could connect"):
        server.__enter__()


def test_an_address_that_is_taken_or_not_ours_is_a_config_error():
    with (
        listening() as server,
        pytest.raises(ConfigError, match="in use"),
        listening(address=parse_tcp(server.endpoint)),
    ):
        pass
    foreign = Network(TcpAddress("192.0.2.7", 7000), keyring("target"))
    with (
        pytest.raises(ConfigError, match=r"cannot listen at tcp://192\.0\.2\.7:7000"),
        Server(foreign, TARGET_REQUESTS, link="target", right=Given(LIFE)),
    ):
        pass


def test_a_message_that_is_too_large_costs_its_sender_the_connection_and_nobody_else():
    with (
        listening(keyring("target")) as server,
        linked(server, keyring("supervisor")) as (poller, link),
        linked(server, keyring("supervisor")) as (other, good),
    ):
        link.send(HELLO)
        received(poller, server)
        link.end.send(bytes(MAX_MESSAGE_BYTES + 1))
        good.send(HELLO)
        assert received(other, server).message == HELLO


def test_garbage_from_an_admitted_peer_is_answered_and_counted():
    with (
        listening(keyring("target")) as server,
        linked(server, keyring("supervisor")) as (poller, link),
    ):
        link.send(HELLO)
        received(poller, server)
        link.end.send(b"\xc1garbage")
        (answer,) = reply(poller, link, server)
        assert isinstance(answer, Failed)
        assert answer.code == ProtocolError.code
        assert server.counts.malformed == 1


GOOD = [b"1.0", b"1", ZAP_DOMAIN, b"192.0.2.1", b"", b"CURVE", bytes(32)]


@pytest.mark.parametrize(
    ("index", "frame"),
    [(0, b"2.0"), (2, b"other"), (2, b""), (5, b"NULL"), (5, b"PLAIN"), (6, b""), (6, bytes(31))],
)
def test_only_a_curve_key_of_our_domain_is_judged(index, frame):
    admitted = {b"0" * 40: "supervisor"}
    assert judge(GOOD, admitted) == "supervisor"
    request = [*GOOD]
    request[index] = frame
    assert judge(request, admitted) == ""
    assert judge([], admitted) == ""
    assert judge(GOOD[:-1], admitted) == ""


def test_a_handshake_that_is_malformed_is_refused_and_the_gate_serves_on():
    context = zmq.Context()
    try:
        gate = Gate(context, {b"0" * 40: "supervisor"})
        asking = context.socket(zmq.REQ)
        asking.linger = 0
        asking.connect("inproc://zeromq.zap.01")
        for request in ([b"1.0"], [b"\xff"] * 9, GOOD):
            asking.send_multipart(request)
            gate.answer()
            answer = asking.recv_multipart()
            assert (answer[2], answer[4]) == (
                (b"200", b"supervisor") if request is GOOD else (b"400", b"")
            )
        assert gate.refused == 2
    finally:
        context.destroy(linger=0)


def test_a_keyring_names_what_is_wrong_with_it():
    with pytest.raises(ConfigError, match="0 public keys of a target"):
        Keyring(PAIRS["draft"]).server("target")
    with pytest.raises(ConfigError, match="2 public keys of a target"):
        Keyring(PAIRS["draft"], {b"0" * 40: "target", b"1" * 40: "target"}).server("target")
    assert keyring("draft").server("target") == PAIRS["target"].public
    assert PAIRS["draft"].secret.decode() not in repr(keyring("draft"))


def test_a_keyring_is_read_from_a_folder(tmp_path):
    folder = write_keys(tmp_path / "keys", "draft")
    assert read_keyring("draft", folder, {}) == keyring("draft")
