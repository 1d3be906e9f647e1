"""Shared memory: guests that ask wrongly, stay silent, vanish or are of another user."""

import gc
import os
import select
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from support.ring_peers import LIFE, NONCE, SHAPE, attach

from protocol import arena_layout
from protocol.arena_layout import Ask, Refusal
from protocol.errors import (
    PermissionRefused,
    TransportRefused,
)
from protocol.ring_server import MAX_WAITING
from protocol.transports.shared_memory import TRANSPORT

pytestmark = pytest.mark.process


@pytest.fixture
def host(runtime_dir):
    half = TRANSPORT.host(runtime_dir)
    yield half
    half.close()
    gc.collect()


def connect(run_dir):
    guest = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    guest.settimeout(5)
    guest.connect(str(run_dir / "ring.sock"))
    return guest


def refusal_to(host, run_dir, packet):
    with connect(run_dir) as guest:
        guest.send(packet)
        host.serve()
        host.serve()
        data, fds, _, _ = socket.recv_fds(guest, 1 << 16, 4)
        assert fds == []
        return arena_layout.decode_answer(data)


@pytest.mark.parametrize(
    ("packet", "code"),
    [
        (b"\xc1", "protocol"),
        (b"x" * 10_000, "protocol"),
        (b"\x91" * 200, "protocol"),
        (arena_layout.encode(Ask(nonce=NONCE, life=LIFE)) + b"\0", "protocol"),
        (arena_layout.encode(Refusal(code="a", detail="b")), "protocol"),
        (msgspec.msgpack.encode({"type": "Ask", "nonce": -1, "life": LIFE}), "protocol"),
        (arena_layout.encode(Ask(nonce=NONCE + 1, life=LIFE)), "stale"),
        (arena_layout.encode(Ask(nonce=NONCE, life=LIFE - 1)), "stale"),
    ],
    ids=[
        "garbage",
        "oversize",
        "nested",
        "trailing byte",
        "a refusal",
        "negative nonce",
        "other nonce",
        "other life",
    ],
)
def test_a_guest_that_asks_wrongly_gets_a_typed_refusal_and_no_descriptor(
    host, runtime_dir, packet, code
):
    host.create_ring(SHAPE)
    host.offer(NONCE, LIFE)
    answer = refusal_to(host, runtime_dir, packet)
    assert isinstance(answer, Refusal)
    assert answer.code == code
    attach(TRANSPORT, host, runtime_dir, SHAPE).close()


def test_silent_and_vanishing_guests_lock_nobody_out(host, runtime_dir):
    host.create_ring(SHAPE)
    host.offer(NONCE, LIFE)
    silent = []
    for _ in range(3 * MAX_WAITING):
        silent.append(connect(runtime_dir))
        host.serve()
    gone = connect(runtime_dir)
    gone.send(arena_layout.encode(Ask(nonce=NONCE, life=LIFE)))
    gone.close()
    host.serve()
    host.serve()
    assert len(host._server.waiting) <= MAX_WAITING
    attach(TRANSPORT, host, runtime_dir, SHAPE).close()
    for guest in silent:
        guest.close()


STRANGER = """
import os, socket, sys
os.chdir(sys.argv[1]); os.setgid(65534); os.setuid(65534)
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.settimeout(10)
try:
    s.connect("ring.sock")
except PermissionError:
    print("mode"); sys.exit()
s.send(sys.stdin.buffer.read())
data, fds, _, _ = socket.recv_fds(s, 65536, 4)
print(len(fds), b"permission" in data)
"""


def stranger(host, run_dir):
    """Ask as another user of this machine; return what that user saw."""
    ask = arena_layout.encode(Ask(nonce=NONCE, life=LIFE))
    with ThreadPoolExecutor(1) as pool:
        command = [sys.executable, "-c", STRANGER, run_dir]
        future = pool.submit(
            subprocess.run, command, input=ask, capture_output=True, check=True, timeout=60
        )
        while not future.done():
            if select.select([host.fileno()], [], [], 0.01)[0]:
                host.serve()
    return future.result().stdout.decode().strip()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_another_user_is_refused_by_the_mode_and_behind_it_by_the_uid(host, runtime_dir):
    host.create_ring(SHAPE)
    host.offer(NONCE, LIFE)
    for folder in (runtime_dir, runtime_dir.parent):
        folder.chmod(0o711)
    assert stranger(host, runtime_dir) == "mode"
    (runtime_dir / "ring.sock").chmod(0o666)
    assert stranger(host, runtime_dir) == "0 True"


def test_both_ends_refuse_a_peer_of_another_user(host, runtime_dir, monkeypatch):
    host.create_ring(SHAPE)
    host.offer(NONCE, LIFE)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    answer = refusal_to(host, runtime_dir, arena_layout.encode(Ask(nonce=NONCE, life=LIFE)))
    assert answer.code == "permission"
    with pytest.raises(PermissionRefused, match=f"user {uid}, not {uid + 1}"):
        attach(TRANSPORT, host, runtime_dir, SHAPE)


def test_a_path_that_is_too_long_or_taken_by_a_file_is_refused(runtime_dir):
    deep = runtime_dir / ("x" * 100)
    deep.mkdir()
    for folder in (deep, runtime_dir):
        (runtime_dir / "ring.sock").touch()
        host = TRANSPORT.host(folder)
        view = host.create_ring(SHAPE)
        with pytest.raises(TransportRefused):
            host.offer(NONCE, LIFE)
        del view
        host.close()
    assert (runtime_dir / "ring.sock").exists()  # somebody else's
    (runtime_dir / "ring.sock").unlink()
    deep.rmdir()
