"""The ring's Unix socket: private to one user, one packet each way, descriptors alongside.

SEQPACKET keeps message borders, so that nothing has to be framed, and tells both ends who the
other is (SO_PEERCRED).
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol import arena_layout, private_socket
from protocol.arena_layout import Ask, Layout, Probed, Refusal
from protocol.errors import (
    DeadlineExceeded,
    TransportRefused,
    from_wire,
)
from protocol.private_socket import check_peer


def listen(path: Path, backlog: int) -> socket.socket:
    """Bind the ring socket, private to the user; one that a dead process left is replaced."""
    _remove_stale(path)
    return private_socket.bind(path, socket.SOCK_SEQPACKET, backlog, TransportRefused)


def _remove_stale(path: Path) -> None:
    if not path.is_socket():
        return  # nothing there, or not ours: bind will tell
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError:  # gone meanwhile, or nothing that can be judged: bind will tell
            return
    raise TransportRefused(f"another target listens at {path}; end it first")


def fetch(address: str, ask: Ask, timeout: float) -> tuple[Layout | Refusal, list[int]]:
    """Ask the host at `address`; the descriptors that come along are the caller's to close.

    Raises TransportRefused when nobody listens or the answer is not whole, DeadlineExceeded when
    none comes within `timeout` seconds, PermissionRefused, and ProtocolError.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        return ask_over(connection, address, ask, timeout)


def ask_over(
    connection: socket.socket, address: str, ask: Ask, timeout: float
) -> tuple[Layout | Refusal, list[int]]:
    """`fetch` over a new socket of the caller's, which stays connected: the lease."""
    with _typed(address, timeout):
        connection.settimeout(timeout)
        connection.connect(address)
        check_peer(connection)
        connection.send(arena_layout.encode(ask))
        data, descriptors, flags, _ = socket.recv_fds(
            connection,
            arena_layout.MAX_ANSWER_BYTES,
            arena_layout.MAX_ARENAS,
            socket.MSG_CMSG_CLOEXEC,
        )
    try:
        return _decode(data, flags), descriptors
    except BaseException:
        for fd in descriptors:
            os.close(fd)
        raise


def confirm(connection: socket.socket, address: str, probed: Probed) -> None:
    """Have the host look at what a probe wrote; raises what it finds wrong."""
    with _typed(address, connection.gettimeout() or 0.0):
        connection.send(arena_layout.encode(probed))
        data = connection.recv(arena_layout.MAX_ANSWER_BYTES)
    connection.setblocking(False)  # it is only looked at from here on
    answer = arena_layout.decode_judgement(data)
    if isinstance(answer, Refusal):
        raise from_wire(answer.code, answer.detail)
    if answer != probed:
        raise TransportRefused("the target looked at another probe than this one")


def has_ended(connection: socket.socket) -> bool:
    """Whether the process at the other end of a confirmed lease is gone."""
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextmanager
def _typed(address: str, timeout: float) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise DeadlineExceeded(f"no answer from {address} within {timeout} s") from error
    except OSError as error:
        raise TransportRefused(f"no target offers its ring at {address}: {error}") from error


def _decode(data: bytes, flags: int) -> Layout | Refusal:
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or not data:
        raise TransportRefused("the answer from the ring socket is empty or longer than allowed")
    return arena_layout.decode_answer(data)
