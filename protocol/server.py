"""The daemon's half of the control link: bind, meet, receive, reply. One thread, one poll loop."""

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Generic, Self, TypeVar, cast

import zmq

from protocol.boundary import answer, failed, typed
from protocol.codec import decode, encode
from protocol.ending import EndingSignals
from protocol.errors import (
    AskedToLeave,
    DaemonError,
    InternalError,
    NotTheDriver,
    PermissionRefused,
    ProtocolError,
    StaleMessage,
    WireMismatch,
)
from protocol.gate import ROLE, Gate
from protocol.listening import Network, listen
from protocol.messages import WIRE_VERSION, Attach, Failed, Hello, Leave, LinkMessage
from protocol.notify import Notifier
from protocol.right import Right
from protocol.sockets import Context, Socket
from protocol.state import ROLES, LinkName

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
    """A ROUTER for the messages of one link of this daemon.

    Entering binds: a socket file for this user alone, which leaving removes, or a `Network`
    address. A peer must say Hello before anything else, and `right` says whether it may; over a
    network it may send only what its role can mean. What is malformed, stale or foreign is refused
    with `Failed` and counted, and never reaches the daemon. Binding over a live socket file steals
    it: the run directory's lock must be held.
    """

    def __init__(
        self,
        place: Path | Network,
        requests: tuple[type[Request], ...],
        *,
        link: LinkName,
        right: Right,
    ) -> None:
        self._place = place
        self._requests: tuple[type[Request | Leave], ...] = (*requests, Leave)
        self._link: LinkName = link
        self._right = right
        self._met: dict[bytes, None] = {}
        self._met_life = right.life
        self._extra: frozenset[int] = frozenset()
        self._poller = zmq.Poller()
        self._context: Context | None = None
        self._socket: Socket | None = None
        self._gate: Gate | None = None
        self.counts = LinkCounts()

    def __enter__(self) -> Self:
        self._context = zmq.Context()
        try:
            self._socket, self._gate = listen(self._context, self._place, self._link)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._poller.register(self._socket, READABLE)
        if self._gate is not None:
            self._poller.register(self._gate.socket, READABLE)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        socket, context = self._bound(), cast("Context", self._context)
        self._poller.unregister(socket)
        if self._gate is not None:
            self._poller.unregister(self._gate.socket)
        # A last reply may still wait for its peer: give it a moment, never more.
        context.destroy(linger=100)
        # libzmq removes only the files of the names that it chose itself.
        if isinstance(self._place, Path):
            self._place.unlink(missing_ok=True)
        self._socket = self._context = self._gate = None

    @property
    def endpoint(self) -> str:
        """Where it listens, with the port that the system chose for port 0."""
        return self._bound().get_string(zmq.LAST_ENDPOINT).rstrip("\0")

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
        if self._gate is not None:
            self._gate.answer()
        return frozenset(source for source, _ in ready if isinstance(source, int))

    def receive(self) -> Received[Request] | None:
        """The next legal message, or None when none waits; what is not legal is answered here.

        Raises AskedToLeave when the driver finds this daemon sick.
        """
        while True:
            socket = self._bound()
            if not int(socket.getsockopt(zmq.EVENTS)) & READABLE:
                return None
            peer, role, parts = self._take(socket)
            message = None
            try:
                message = self._read(parts)
                self._check_role(role, message)
                self._check(peer, message)
            except (ProtocolError, NotTheDriver, PermissionRefused) as error:
                self._refuse(peer, message, error)
                continue
            if isinstance(message, ROLES[self._link]["supervisor"]):
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

    def _take(self, socket: Socket) -> tuple[bytes, str, list[bytes]]:
        """The next message's sender, the role that the gate gave it, and its frames."""
        if self._gate is None:
            peer, *parts = socket.recv_multipart(NOT_WAITING)
            return peer, "", parts
        frames = socket.recv_multipart(NOT_WAITING, copy=False)
        peer, *parts = (frame.bytes for frame in frames)
        return peer, str(frames[-1].get(ROLE)), parts

    def _check_role(self, role: str, message: LinkMessage) -> None:
        if self._gate is not None and not isinstance(message, ROLES[self._link].get(role, ())):
            raise PermissionRefused(f"a {role} may not send {type(message).__name__} here")

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
        if isinstance(message, Hello | Attach) and message.wire_version != WIRE_VERSION:
            raise WireMismatch(
                f"this {self._link} daemon speaks wire version {WIRE_VERSION}, "
                f"the peer {message.wire_version}"
            )
        life = message.target_life if self._link == "target" else message.draft_life
        if isinstance(message, Hello) and life != self._right.life:
            self._right.claim(life, message.owner)
        if life != self._right.life:
            own = f"this is life {self._right.life} of the {self._link}"
            raise StaleMessage(f"{name} for life {life}; {own}")
        if isinstance(message, Hello | Attach):
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

    def _bound(self) -> Socket:
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
