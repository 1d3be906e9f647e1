"""The supervisor's half of the control links, and the one wait of its loop. No thread, no asyncio.

A message is *sent*; its reply is an event that the poll loop finds later. Deadlines are the
loop's: it passes the nearest one as the timeout of `Poller.poll`.
"""

import math
import os
import time
from collections import deque
from types import TracebackType
from typing import Final, Generic, Self, TypeVar

import zmq

from protocol.codec import MAX_MESSAGE_BYTES, decode, encode
from protocol.errors import ConfigError, InternalError, Overloaded, ProtocolError
from protocol.link_settings import (
    HANDSHAKE_MILLISECONDS,
    HEARTBEAT_MILLISECONDS,
    HEARTBEAT_TIMEOUT_MILLISECONDS,
    HIGH_WATER_MARK,
)
from protocol.messages import LinkMessage

RECONNECT_MILLISECONDS: Final = 20
RECONNECT_MAX_MILLISECONDS: Final = 1000
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
        self, poller: "Poller", socket: "zmq.Socket[bytes]", replies: tuple[type[Reply], ...]
    ) -> None:
        self._poller = poller
        self._replies = replies
        self._outbox: deque[bytes] = deque()
        self.socket = socket

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
        self.socket.close(linger=0)

    def _try(self, data: bytes) -> bool:
        try:
            self.socket.send(data, NOT_WAITING)
        except zmq.Again:
            return False
        return True

    def _read(self, parts: list[bytes]) -> Reply | ProtocolError:
        if len(parts) != 1:
            return ProtocolError(f"a reply of {len(parts)} frames; one is expected")
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
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._poller = zmq.Poller()
        self._links: dict[zmq.Socket[bytes], Link[LinkMessage]] = {}

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

    def connect(self, address: str, replies: tuple[type[Reply], ...]) -> Link[Reply]:
        """Open a link to the daemon that binds, or will bind, `address` (``ipc://...``)."""
        if self._context is None:
            raise InternalError("the poller is not entered")
        socket = self._context.socket(zmq.DEALER)
        options: dict[int, int | bytes] = {
            zmq.LINGER: 0,
            zmq.SNDHWM: HIGH_WATER_MARK,
            zmq.RCVHWM: HIGH_WATER_MARK,
            zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
            zmq.IMMEDIATE: 1,
            zmq.RECONNECT_IVL: RECONNECT_MILLISECONDS,
            zmq.RECONNECT_IVL_MAX: RECONNECT_MAX_MILLISECONDS,
            zmq.HANDSHAKE_IVL: HANDSHAKE_MILLISECONDS,
            zmq.HEARTBEAT_IVL: HEARTBEAT_MILLISECONDS,
            zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MILLISECONDS,
            # One name for all connections of this link: a reconnection needs no second Hello.
            zmq.ROUTING_ID: b"\x01" + os.urandom(16),
        }
        for option, value in options.items():
            socket.setsockopt(option, value)
        link = Link(self, socket, replies)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise ProtocolError(f"cannot connect to {address}: {error.strerror}") from error
        self._links[socket] = link  # type: ignore[assignment]  # replies of all links in one table
        self.watch(link, write=False)
        return link

    def add(self, fd: int, *, write: bool = False) -> None:
        """Watch a descriptor for reading, and for writing if asked; adding again changes that."""
        self._poller.register(fd, READABLE | (WRITABLE if write else 0))

    def remove(self, fd: int) -> None:
        """Stop watching; must be called before the descriptor is closed."""
        self._poller.unregister(fd)

    def poll(self, timeout: float | None) -> list["Link[LinkMessage] | int"]:
        """Wait at most `timeout` seconds; return the links with replies and the ready descriptors.

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


def new_curve_keys() -> tuple[bytes, bytes]:
    """A new public and secret key, in Z85; ConfigError where ZeroMQ was built without CURVE."""
    try:
        return zmq.curve_keypair()
    except zmq.ZMQError as error:
        raise ConfigError(f"this ZeroMQ makes no keys: {error.strerror}") from error
