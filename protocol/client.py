"""The supervisor's half of the control links, and the one wait of its loop. No thread, no asyncio.

A message is *sent*; its reply is an event that the poll loop finds later. Deadlines are the
loop's: it passes the nearest one as the timeout of `Poller.poll`.
"""

import math
import time
from collections import deque
from types import TracebackType
from typing import Final, Generic, Self, TypeVar

import zmq

from protocol.addresses import is_tcp, parse_tcp
from protocol.codec import decode, encode
from protocol.errors import ConfigError, DaemonError, InternalError, Overloaded, ProtocolError
from protocol.keyring import Keyring
from protocol.keys import Role
from protocol.messages import LinkMessage
from protocol.monitor import Monitor
from protocol.sockets import Context, Socket, connect_ipc, connect_tcp, dealer_tcp

MAX_OUTBOX: Final = 64  # messages that wait for a peer that is not there yet, or does not read
MAX_BATCH: Final = 256  # replies taken in one turn of the loop
# Plain numbers: arithmetic on pyzmq's enumerations is done in Python, with every message.
READABLE: Final = int(zmq.POLLIN)
WRITABLE: Final = int(zmq.POLLOUT)
NOT_WAITING: Final = int(zmq.NOBLOCK)

Reply = TypeVar("Reply", bound=LinkMessage)


class Link(Generic[Reply]):
    """A DEALER to one daemon; made by `Poller.connect`, ended by `close`.

    The daemon need not have bound yet. What is sent before it has waits here, until `Poller.poll`
    finds the daemon, and not in ZeroMQ: once this link is closed, nothing of it can reach a later
    daemon at the same address.
    """

    def __init__(
        self,
        poller: "Poller",
        socket: Socket,
        replies: tuple[type[Reply], ...],
        monitor: Monitor | None = None,
    ) -> None:
        self._poller = poller
        self._replies = replies
        self._outbox: deque[bytes] = deque()
        self.socket = socket
        self.monitor = monitor  # of a connection over a network
        self.moved_bytes = 0  # of messages, both ways, before they are encrypted

    @property
    def trouble(self) -> DaemonError | None:
        """Why there is no connection over a network now; None with one, and for ``ipc``."""
        return None if self.monitor is None else self.monitor.trouble()

    @property
    def broken(self) -> DaemonError | None:
        """Why nothing that was sent over a network may be answered any more, ever."""
        if self.monitor is None:
            return None
        self.monitor.trouble()
        return self.monitor.broken

    def send(self, message: LinkMessage) -> None:
        """Send, or queue; never blocks. Raises Overloaded when the queue is full."""
        data = encode(message)
        self.flush()
        if not self._outbox and self._try(data):
            return
        if len(self._outbox) >= MAX_OUTBOX:
            raise Overloaded(f"{MAX_OUTBOX} messages already wait for the daemon")
        self._outbox.append(data)
        self._poller.watch(self, write=True)

    def receive(self) -> list[Reply | ProtocolError]:
        """All replies that wait; a malformed one is in the list as its ProtocolError."""
        found: list[Reply | ProtocolError] = []
        # Asking what waits costs less than the exception that says that nothing does.
        while len(found) < MAX_BATCH and int(self.socket.getsockopt(zmq.EVENTS)) & READABLE:
            found.append(self._read(self.socket.recv_multipart(NOT_WAITING)))
        return found

    def flush(self) -> None:
        """Send what waits, as far as the daemon takes it; the poller calls this."""
        while self._outbox and self._try(self._outbox[0]):
            self._outbox.popleft()
            if not self._outbox:
                self._poller.watch(self, write=False)

    def close(self) -> None:
        """Drop what was not sent and forget the daemon; closing twice is harmless."""
        self._outbox.clear()
        self._poller.forget(self)
        if self.monitor is not None:
            self.monitor.close()
        self.socket.close(linger=0)

    def _try(self, data: bytes) -> bool:
        try:
            self.socket.send(data, NOT_WAITING)
        except zmq.Again:
            return False
        self.moved_bytes += len(data)
        return True

    def _read(self, parts: list[bytes]) -> Reply | ProtocolError:
        if len(parts) != 1:
            return ProtocolError(f"a reply of {len(parts)} frames; one is expected")
        self.moved_bytes += len(parts[0])
        try:
            return decode(parts[0], self._replies)
        except ProtocolError as error:
            return error


class Poller:
    """Waits for links and for plain descriptors (pipes, pidfds, sockets) together.

    Level-triggered for both: whatever was not read is reported again. A descriptor is reported
    when it can be read, has reached its end, or is broken.
    """

    def __init__(self) -> None:
        self._context: Context | None = None
        self._poller = zmq.Poller()
        self._links: dict[Socket, Link[LinkMessage]] = {}
        self._monitored: dict[Socket, Link[LinkMessage]] = {}  # by what reports of its connection

    def __enter__(self) -> Self:
        self._context = zmq.Context()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for link in list(self._links.values()):
            link.close()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def connect(
        self,
        address: str,
        replies: tuple[type[Reply], ...],
        *,
        role: Role = "target",
        keyring: Keyring | None = None,
    ) -> Link[Reply]:
        """Open a link to the daemon that binds, or will bind, `address`: ``ipc://`` or ``tcp://``.

        Over a network the daemon of that `role` must prove to have the key that `keyring` knows
        of it; ConfigError without keys, except on the loopback interface.
        """
        if self._context is None:
            raise InternalError("the poller is not entered")
        if is_tcp(address):
            socket, monitor = _connect_tcp(self._context, address, role, keyring)
        else:
            socket, monitor = connect_ipc(self._context, address), None
        link = Link(self, socket, replies, monitor)
        self._links[socket] = link  # type: ignore[assignment]  # replies of all links in one table
        self.watch(link, write=False)
        if monitor is not None and monitor.source is not None:
            self._monitored[monitor.source] = link  # type: ignore[assignment]  # as above
            self._poller.register(monitor.source, READABLE)
        return link

    def add(self, fd: int, *, write: bool = False) -> None:
        """Watch a descriptor for reading, and for writing if asked; adding again changes that."""
        self._poller.register(fd, READABLE | (WRITABLE if write else 0))

    def remove(self, fd: int) -> None:
        """Stop watching; must be called before the descriptor is closed."""
        self._poller.unregister(fd)

    def poll(self, timeout: float | None) -> list["Link[LinkMessage] | int"]:
        """Wait at most `timeout` seconds; return links that have replies or are broken, and fds.

        None waits for ever, which is right only where a signal's wakeup descriptor is watched.
        """
        milliseconds = None if timeout is None else max(0, math.ceil(timeout * 1000))
        ready: list[Link[LinkMessage] | int] = []
        if not self._poller.sockets:  # pyzmq would return at once
            if timeout is None:
                raise InternalError("a wait for nothing, for ever")
            time.sleep(max(0.0, timeout))
        for source, events in self._poller.poll(milliseconds):
            if isinstance(source, int):
                ready.append(source)
                continue
            if source in self._monitored:
                if self._monitored[source].broken is not None:
                    ready.append(self._monitored[source])
                continue
            link = self._links[source]
            if events & WRITABLE:
                link.flush()
            if events & READABLE:
                ready.append(link)
        return ready

    def watch(self, link: Link[Reply], *, write: bool) -> None:
        """For `Link`: whether the loop also waits until the daemon takes a message."""
        self._poller.register(link.socket, READABLE | (WRITABLE if write else 0))

    def forget(self, link: Link[Reply]) -> None:
        """For `Link.close`."""
        if self._links.pop(link.socket, None) is not None:
            self._poller.unregister(link.socket)
        source = None if link.monitor is None else link.monitor.source
        if source is not None and self._monitored.pop(source, None) is not None:
            self._poller.unregister(source)


def new_curve_keys() -> tuple[bytes, bytes]:
    """A new public and secret key, in Z85; ConfigError where ZeroMQ was built without CURVE."""
    try:
        return zmq.curve_keypair()
    except zmq.ZMQError as error:
        raise ConfigError(f"this ZeroMQ makes no keys: {error.strerror}") from error


def _connect_tcp(
    context: Context, address: str, role: Role, keyring: Keyring | None
) -> tuple[Socket, Monitor]:
    place = parse_tcp(address)
    keys, server = (None, b"") if keyring is None else (keyring.own, keyring.server(role))
    socket = dealer_tcp(context, place, keys, server)
    monitor = Monitor(socket, f"the {role} at {place}")
    try:
        connect_tcp(socket, place)
    except BaseException:
        monitor.close()
        raise
    return socket, monitor
