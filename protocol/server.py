"""The daemon's half of the control link: bind, meet, receive, reply. One thread, one poll loop."""

import logging
import select
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Generic, Self, TypeVar

import msgspec

from protocol.boundary import answer, failed, typed
from protocol.codec import decode, encode
from protocol.ending import EndingSignals
from protocol.ends import Listener, listen
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
from protocol.listening import Network
from protocol.messages import WIRE_VERSION, Attach, Failed, Hello, Leave, LinkMessage
from protocol.notify import Notifier
from protocol.right import Right
from protocol.state import ROLES, LinkName

MAX_PEERS: Final = 64
SILENT: Final = Notifier()
NOTHING: Final[frozenset[int]] = frozenset()
MEETING: Final = (Hello, Attach)
READABLE: Final = select.POLLIN

Request = TypeVar("Request", bound=LinkMessage)

log = logging.getLogger(__name__)


class Received(msgspec.Struct, Generic[Request], frozen=True):
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
    """Takes in the messages of one link of this daemon, from any number of peers.

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
        self._poll = select.poll()
        self._extra: tuple[int, ...] = ()
        self._end: Listener | None = None
        self.counts = LinkCounts()

    def __enter__(self) -> Self:
        self._end = listen(self._place, self._watch, self._link)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        end, self._end = self._bound, None
        end.close()

    @property
    def endpoint(self) -> str:
        """Where it listens, with the port that the system chose for port 0."""
        return self._bound.endpoint

    def poll(self, extra: tuple[int, ...], timeout: float | None) -> frozenset[int]:
        """Wait for a message, or for one of the descriptors `extra`; return those of `extra`.

        `timeout` is in seconds; None is for a loop whose `extra` holds the lifeline.
        """
        end = self._bound
        if extra != self._extra:
            self._watch_extra(extra)
        milliseconds = None if timeout is None else timeout * 1000
        ready = []
        for fd, events in self._poll.poll(0 if end.has_message() else milliseconds):
            if fd in extra:
                ready.append(fd)
            else:
                end.attend(fd, events)
        return frozenset(ready) if ready else NOTHING

    def receive(self) -> Received[Request] | None:
        """The next legal message, or None when none waits; what is not legal is answered here.

        Raises AskedToLeave when the driver finds this daemon sick.
        """
        while True:
            found = self._bound.receive()
            if found is None:
                return None
            peer, role, data = found
            message = None
            try:
                if isinstance(data, ProtocolError):
                    raise data
                message = decode(data, self._requests)
                if role is not None:
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
        if lost := self._bound.send(peer, data):
            self.counts.undelivered += 1
            log.warning("undelivered %s: %s", type(message).__name__, lost)

    def _check_role(self, role: str, message: LinkMessage) -> None:
        if not isinstance(message, ROLES[self._link].get(role, ())):
            raise PermissionRefused(f"a {role} may not send {type(message).__name__} here")

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
        if isinstance(message, MEETING) and message.wire_version != WIRE_VERSION:
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
        if isinstance(message, MEETING):
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

    def _watch_extra(self, extra: tuple[int, ...]) -> None:
        for fd in set(self._extra).difference(extra):
            self._poll.unregister(fd)
        for fd in set(extra).difference(self._extra):
            self._poll.register(fd, READABLE)
        self._extra = extra

    def _watch(self, fd: int, events: int) -> None:
        if events:
            self._poll.register(fd, events)
        else:
            self._poll.unregister(fd)

    @property
    def _bound(self) -> Listener:
        if self._end is None:
            raise InternalError("the server is not bound")
        return self._end


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
    ends = lifeline.fds
    while True:
        ready = server.poll((*extra, *ends), timeout=notifier.interval)
        if ready and not ready.isdisjoint(ends) and lifeline.ended():
            return
        for fd in ready:
            if fd in extra:
                extra[fd]()
        received = server.receive()
        if received is not None:
            began = time.monotonic()
            reply = answer(handle, received.message)
            server.reply(received.peer, reply)
            server.worked(time.monotonic() - began)
        notifier.alive()
