"""A control link over a network: ZeroMQ, with CURVE and a list of keys where there are keys.

ZeroMQ's sockets have a descriptor that says only that something may have changed; what is there is
asked of the socket before every wait.
"""

from contextlib import ExitStack
from typing import Final

import zmq

from protocol.addresses import TcpAddress
from protocol.errors import DaemonError, ProtocolError
from protocol.gate import ROLE, Gate
from protocol.keyring import Keyring
from protocol.keys import Role
from protocol.link_settings import LAST_WORDS_MILLISECONDS, Watch
from protocol.listening import Network
from protocol.monitor import Monitor
from protocol.sockets import Context, Socket, connect_tcp, dealer_tcp, listen_tcp
from protocol.state import LinkName

MAX_BATCH: Final = 256  # messages taken in one turn of the loop
# Plain numbers: arithmetic on pyzmq's enumerations is done in Python, with every message.
READABLE: Final = int(zmq.POLLIN)
WRITABLE: Final = int(zmq.POLLOUT)
NOT_WAITING: Final = int(zmq.NOBLOCK)


class NetworkCaller:
    """`protocol.ends.Caller`: a DEALER, its monitor, and a context of its own for both."""

    is_steady: Final = False

    def __init__(
        self, address: TcpAddress, watch: Watch, role: Role, keyring: Keyring | None
    ) -> None:
        self._watch = watch
        self._wants_write = self._told = False
        self._context: Context = zmq.Context()
        with ExitStack() as undo:
            undo.callback(self._context.destroy, linger=0)
            keys, server = (None, b"") if keyring is None else (keyring.own, keyring.server(role))
            self._socket = dealer_tcp(self._context, address, keys, server)
            self._monitor = Monitor(self._socket, f"the {role} at {address}")
            undo.callback(self._monitor.close)
            connect_tcp(self._socket, address)
            undo.pop_all()
        self._fds = tuple(_fd(one) for one in (self._socket, self._monitor.source) if one)
        for fd in self._fds:
            watch(fd, READABLE)

    @property
    def trouble(self) -> DaemonError | None:
        return self._monitor.trouble()

    @property
    def broken(self) -> DaemonError | None:
        self._monitor.trouble()
        return self._monitor.broken

    @property
    def has_news(self) -> bool:
        told, self._told = self._told, self.broken is not None  # said once: it stays so
        return bool(_events(self._socket) & READABLE) or self._told > told

    def prepare(self) -> float | None:
        ready = _events(self._socket)
        return 0.0 if ready & READABLE or (self._wants_write and ready & WRITABLE) else None

    def want_write(self, *, wanted: bool) -> None:
        self._wants_write = wanted

    def send(self, data: bytes) -> bool:
        try:
            self._socket.send(data, NOT_WAITING)
        except zmq.Again:
            return False
        return True

    def flush(self) -> bool:
        return bool(_events(self._socket) & WRITABLE)

    def receive(self) -> list[bytes | ProtocolError]:
        found: list[bytes | ProtocolError] = []
        # Asking what waits costs less than the exception that says that nothing does.
        while len(found) < MAX_BATCH and _events(self._socket) & READABLE:
            found.append(_whole(self._socket.recv_multipart(NOT_WAITING)))
        return found

    def close(self) -> None:
        for fd in self._fds:
            self._watch(fd, 0)
        self._fds = ()
        self._monitor.close()
        self._context.destroy(linger=0)


class NetworkListener:
    """`protocol.ends.Listener`: a ROUTER, and the gate in front of it where keys are used."""

    def __init__(self, place: Network, watch: Watch, link: LinkName) -> None:
        self._watch = watch
        self._context: Context = zmq.Context()
        with ExitStack() as undo:
            undo.callback(self._context.destroy, linger=0)
            own = None if place.keyring is None else place.keyring.own
            # The gate comes first: a socket admits all while nobody judges.
            self.gate = None if own is None else Gate(self._context, place.admitted(link))
            self._socket = listen_tcp(self._context, place.address, own)
            undo.pop_all()
        sockets = (self._socket, None if self.gate is None else self.gate.socket)
        self._fds = tuple(_fd(one) for one in sockets if one)
        for fd in self._fds:
            watch(fd, READABLE)

    @property
    def endpoint(self) -> str:
        return self._socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")

    def has_message(self) -> bool:
        if self.gate is not None:
            self.gate.answer()
        return bool(_events(self._socket) & READABLE)

    def attend(self, fd: int, events: int) -> None:
        del fd, events
        if self.gate is not None:
            self.gate.answer()

    def receive(self) -> tuple[bytes, str | None, bytes | ProtocolError] | None:
        if not _events(self._socket) & READABLE:
            return None
        if self.gate is None:
            peer, *parts = self._socket.recv_multipart(NOT_WAITING)
            return peer, None, _whole(parts)
        frames = self._socket.recv_multipart(NOT_WAITING, copy=False)
        peer, *parts = (frame.bytes for frame in frames)
        return peer, str(frames[-1].get(ROLE)), _whole(parts)

    def send(self, peer: bytes, data: bytes) -> str:
        try:
            self._socket.send_multipart((peer, data), NOT_WAITING)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return str(error)
        return ""

    def close(self) -> None:
        for fd in self._fds:
            self._watch(fd, 0)
        self._fds = ()
        self._context.destroy(linger=LAST_WORDS_MILLISECONDS)


def _events(socket: Socket) -> int:
    return int(socket.getsockopt(zmq.EVENTS))


def _fd(socket: Socket) -> int:
    return int(socket.getsockopt(zmq.FD))


def _whole(parts: list[bytes]) -> bytes | ProtocolError:
    if len(parts) != 1:
        return ProtocolError(f"a message of {len(parts)} frames; one is expected")
    return parts[0]
