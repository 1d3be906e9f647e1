"""The daemon's half of the control link: bind, meet, receive, reply. One thread, one poll loop."""

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Generic, Self, TypeVar, cast

import zmq

from protocol.boundary import answer, failed, typed
from protocol.codec import MAX_MESSAGE_BYTES, decode, encode
from protocol.ending import EndingSignals
from protocol.errors import (
    AskedToLeave,
    ConfigError,
    DaemonError,
    InternalError,
    NotTheDriver,
    ProtocolError,
    StaleMessage,
    WireMismatch,
)
from protocol.link_settings import (
    HANDSHAKE_MILLISECONDS,
    HEARTBEAT_MILLISECONDS,
    HEARTBEAT_TIMEOUT_MILLISECONDS,
    HIGH_WATER_MARK,
    check_socket_path,
)
from protocol.messages import WIRE_VERSION, Failed, Hello, Leave, LinkMessage
from protocol.notify import Notifier
from protocol.right import Right
from protocol.state import LinkName

MAX_PEERS: Final = 64
SILENT: Final = Notifier()
# Plain numbers: arithmetic on pyzmq's enumerations is done in Python, with every message.
READABLE: Final = int(zmq.POLLIN)
NOT_WAITING: Final = int(zmq.NOBLOCK)

Request = TypeVar("Request", bound=LinkMessage)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Received(Generic[Request]):
    """A message that the peer may send, of this life."""

    peer: bytes
    message: Request


@dataclass
class LinkCounts:
    """What the daemon refused or could not deliver, since its start."""

    malformed: int = 0
    illegal: int = 0
    stale: int = 0
    undelivered: int = 0


class Server(Generic[Request]):
    """A ROUTER at ``ipc://path`` for the messages of one link of this daemon.

    Entering binds, with permissions for this user alone; leaving removes the socket file. A peer
    must say Hello before anything else, and `right` says whether it may. What is malformed, stale
    or foreign is refused with `Failed` and counted, and never reaches the daemon. Binding over a
    live socket steals it: the run directory's lock must be held.
    """

    def __init__(
        self, path: Path, requests: tuple[type[Request], ...], *, link: LinkName, right: Right
    ) -> None:
        self._path = path
        self._requests: tuple[type[Request | Leave], ...] = (*requests, Leave)
        self._link: LinkName = link
        self._right = right
        self._met: dict[bytes, None] = {}
        self._met_life = right.life
        self._extra: frozenset[int] = frozenset()
        self._poller = zmq.Poller()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self.counts = LinkCounts()

    def __enter__(self) -> Self:
        check_socket_path(self._path)
        self._context = zmq.Context()
        socket = self._context.socket(zmq.ROUTER)
        try:
            _bind(socket, self._path)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._socket = socket
        self._poller.register(socket, READABLE)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        socket, context = self._bound(), cast("zmq.Context[zmq.Socket[bytes]]", self._context)
        self._poller.unregister(socket)
        # A last reply may still wait for its peer: give it a moment, never more.
        context.destroy(linger=100)
        # libzmq removes only the files of the names that it chose itself.
        self._path.unlink(missing_ok=True)
        self._socket = self._context = None

    def poll(self, extra: Collection[int], timeout: float | None) -> frozenset[int]:
        """Wait for a message, or for one of the descriptors `extra`; return those of `extra`.

        `timeout` is in seconds; None is for a loop whose `extra` holds the lifeline.
        """
        wanted = frozenset(extra)
        for fd in self._extra - wanted:
            self._poller.unregister(fd)
        for fd in wanted - self._extra:
            self._poller.register(fd, READABLE)
        self._extra = wanted
        ready = self._poller.poll(None if timeout is None else math.ceil(timeout * 1000))
        return frozenset(source for source, _ in ready if isinstance(source, int))

    def receive(self) -> Received[Request] | None:
        """The next legal message, or None when none waits; what is not legal is answered here.

        Raises AskedToLeave when the driver finds this daemon sick.
        """
        while True:
            socket = self._bound()
            if not int(socket.getsockopt(zmq.EVENTS)) & READABLE:
                return None
            peer, *parts = socket.recv_multipart(NOT_WAITING)
            message = None
            try:
                message = self._read(parts)
                self._check(peer, message)
            except (ProtocolError, NotTheDriver) as error:
                self._refuse(peer, message, error)
                continue
            self._right.heard()
            if isinstance(message, Leave):
                raise AskedToLeave(
                    f"the supervisor asked the {self._link} to leave: {message.reason}"
                )
            return Received(peer, message)

    def worked(self, seconds: float) -> None:
        """The daemon was computing for so long."""
        self._right.worked(seconds)

    def reply(self, peer: bytes, message: LinkMessage) -> None:
        """Queue `message`; a peer that is gone or does not read loses it, and that is counted."""
        try:
            data = encode(message)
        except ProtocolError as error:
            data = encode(failed(message, typed(InternalError(str(error)), "reply")))
        try:
            self._bound().send_multipart((peer, data), NOT_WAITING)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self.counts.undelivered += 1
            log.warning("undelivered %s: %s", type(message).__name__, error)

    def _read(self, parts: list[bytes]) -> Request | Leave:
        if len(parts) != 1:
            raise ProtocolError(f"a message of {len(parts)} frames; one is expected")
        return decode(parts[0], self._requests)

    def _refuse(self, peer: bytes, message: LinkMessage | None, error: DaemonError) -> None:
        if message is None:
            self.counts.malformed += 1
        elif isinstance(error, StaleMessage):
            self.counts.stale += 1
        else:
            self.counts.illegal += 1
        self.reply(peer, failed(message or self._own(), error))

    def _own(self) -> Failed:
        """Stands for a message that could not be read: this daemon's own life."""
        own, none = max(0, self._right.life), 0
        target, draft = (own, none) if self._link == "target" else (none, own)
        return Failed(target_life=target, draft_life=draft, code="", detail="")

    def _check(self, peer: bytes, message: LinkMessage) -> None:
        name = type(message).__name__
        if isinstance(message, Hello) and message.wire_version != WIRE_VERSION:
            raise WireMismatch(
                f"this {self._link} daemon speaks wire version {WIRE_VERSION}, "
                f"the supervisor {message.wire_version}"
            )
        life = message.target_life if self._link == "target" else message.draft_life
        if isinstance(message, Hello) and life != self._right.life:
            self._right.claim(life, message.owner)
        if life != self._right.life:
            raise StaleMessage(
                f"{name} for life {life}; this {self._link} lives {self._right.life}"
            )
        if isinstance(message, Hello):
            self._meet(peer, life)
        elif peer not in self._met and not isinstance(message, Leave):
            raise ProtocolError(f"{name} before Hello")

    def _meet(self, peer: bytes, life: int) -> None:
        """Remember who said Hello in the present life; those of an earlier one are forgotten."""
        if life != self._met_life:
            self._met.clear()
            self._met_life = life
        while len(self._met) >= MAX_PEERS:
            del self._met[next(iter(self._met))]
        self._met[peer] = None

    def _bound(self) -> "zmq.Socket[bytes]":
        if self._socket is None:
            raise InternalError("the server is not bound")
        return self._socket


def serve(
    server: Server[Request],
    handle: Callable[[Request], LinkMessage],
    *,
    extra: Mapping[int, Callable[[], None]],
    lifeline: EndingSignals,
    notifier: Notifier = SILENT,
) -> None:
    """Answer every message with what `handle` returns, until the lifeline says to end.

    Raises AskedToLeave.

    `extra` maps descriptors to what is called when they are readable. One message is handled
    between two polls, so that an end, or a guest of the ring, waits for one call at most. Each turn
    is a sign of life for `notifier`.
    """
    while True:
        ready = server.poll((*extra, *lifeline.fds), timeout=notifier.interval)
        notifier.alive()
        if ready.intersection(lifeline.fds) and lifeline.ended():
            return
        for fd in ready & extra.keys():
            extra[fd]()
        received = server.receive()
        if received is not None:
            began = time.monotonic()
            reply = answer(handle, received.message)
            server.worked(time.monotonic() - began)
            server.reply(received.peer, reply)


def _bind(socket: "zmq.Socket[bytes]", path: Path) -> None:
    options = {
        zmq.LINGER: 0,
        zmq.SNDHWM: HIGH_WATER_MARK,
        zmq.RCVHWM: HIGH_WATER_MARK,
        zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
        zmq.ROUTER_MANDATORY: 1,
        # A supervisor that reconnects keeps its random 128-bit name; only this user can connect.
        zmq.ROUTER_HANDOVER: 1,
        zmq.HANDSHAKE_IVL: HANDSHAKE_MILLISECONDS,
        zmq.HEARTBEAT_IVL: HEARTBEAT_MILLISECONDS,
        zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MILLISECONDS,
        zmq.IPC_FILTER_UID: os.getuid(),
    }
    for option, value in options.items():
        socket.setsockopt(option, value)
    before = os.umask(0o077)
    try:
        socket.bind(f"ipc://{path}")
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot listen at {path}: {error.strerror}") from error
    finally:
        os.umask(before)
