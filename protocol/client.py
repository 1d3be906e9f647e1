"""The supervisor's half of the control links, and the one wait of its loop. No thread, no asyncio.

A message is *sent*; its reply is an event that the poll loop finds later. Deadlines are the
loop's: it passes the nearest one as the timeout of `Poller.poll`.
"""

import select
from collections import deque
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from protocol.codec import decode, encode
from protocol.ends import Caller, call
from protocol.errors import DaemonError, InternalError, Overloaded, ProtocolError
from protocol.keyring import Keyring
from protocol.keys import Role
from protocol.messages import LinkMessage

MAX_OUTBOX: Final = 64  # messages that wait for a peer that is not there yet, or does not read
READABLE: Final = select.POLLIN
WRITABLE: Final = select.POLLOUT

Reply = TypeVar("Reply", bound=LinkMessage)


class Link(Generic[Reply]):
    """One daemon's link; made by `Poller.connect`, ended by `close`.

    The daemon need not have bound yet. What is sent before it has waits here, until `Poller.poll`
    finds the daemon: once this link is closed, nothing of it can reach a later daemon at the same
    address.
    """

    def __init__(
        self,
        poller: "Poller",
        replies: tuple[type[Reply], ...],
        address: str,
        role: Role,
        keyring: Keyring | None,
    ) -> None:
        self._poller = poller
        self._replies = replies
        self._outbox: deque[bytes] = deque()
        self.moved_bytes = 0  # of messages, both ways, before they are encrypted
        self.end: Caller = call(address, self._watch, role, keyring)

    @property
    def trouble(self) -> DaemonError | None:
        """Why there is no connection over a network now; None with one, and for ``ipc``."""
        return self.end.trouble

    @property
    def broken(self) -> DaemonError | None:
        """Why nothing that was sent may be answered any more, ever."""
        return self.end.broken

    def send(self, message: LinkMessage) -> None:
        """Send, or queue; never blocks. Raises Overloaded when the queue is full."""
        data = encode(message)
        if self._outbox:
            self.flush()
        if not self._outbox and self.end.send(data):
            self.moved_bytes += len(data)
            return
        if len(self._outbox) >= MAX_OUTBOX:
            raise Overloaded(f"{MAX_OUTBOX} messages already wait for the daemon")
        self._outbox.append(data)
        self.end.want_write(wanted=True)

    def receive(self) -> list[Reply | ProtocolError]:
        """All replies that wait; a malformed one is in the list as its ProtocolError."""
        found: list[Reply | ProtocolError] = []
        for data in self.end.receive():
            if isinstance(data, ProtocolError):
                found.append(data)
                continue
            self.moved_bytes += len(data)
            try:
                found.append(decode(data, self._replies))
            except ProtocolError as error:
                found.append(error)
        return found

    def flush(self) -> None:
        """Send what waits, as far as the daemon takes it; the poller calls this."""
        taken = self.end.flush()
        while taken and self._outbox and self.end.send(self._outbox[0]):
            self.moved_bytes += len(self._outbox.popleft())
        if taken and not self._outbox:
            self.end.want_write(wanted=False)

    def close(self) -> None:
        """Drop what was not sent and forget the daemon; closing twice is harmless."""
        self._outbox.clear()
        self.end.close()
        self._poller.forget(self)

    def _watch(self, fd: int, events: int) -> None:
        self._poller.watch(self, fd, events)


class Poller:
    """Waits for links and for plain descriptors (pipes, pidfds, sockets) together.

    Level-triggered for both: whatever was not read is reported again. A descriptor is reported
    when it can be read, has reached its end, or is broken.
    """

    def __init__(self) -> None:
        self._poll = select.poll()
        self._links: dict[Link[Any], None] = {}
        self._watched: dict[int, Link[Any] | None] = {}  # whose descriptor; None: plain
        self._is_open = False

    def __enter__(self) -> Self:
        self._is_open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for link in tuple(self._links):
            link.close()
        self._is_open = False

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
        if not self._is_open:
            raise InternalError("the poller is not entered")
        link = Link(self, replies, address, role, keyring)
        self._links[link] = None
        return link

    def add(self, fd: int, *, write: bool = False) -> None:
        """Watch a descriptor for reading, and for writing if asked; adding again changes that."""
        self._watched[fd] = None
        self._poll.register(fd, READABLE | (WRITABLE if write else 0))

    def remove(self, fd: int) -> None:
        """Stop watching; must be called before the descriptor is closed."""
        del self._watched[fd]
        self._poll.unregister(fd)

    def poll(self, timeout: float | None) -> list["Link[LinkMessage] | int"]:
        """Wait at most `timeout` seconds; return links that have replies or are broken, and fds.

        None waits for ever, which is right only where a signal's wakeup descriptor is watched.
        """
        ready: list[Link[LinkMessage] | int] = []
        restless = [link for link in self._links if not link.end.is_steady]
        for link in restless:
            wish = self._look(link, ready)
            if wish is not None:
                timeout = wish if timeout is None else min(wish, timeout)
        if timeout is None and not self._watched:
            raise InternalError("a wait for nothing, for ever")
        self._wait(0.0 if ready else timeout, ready)
        for link in restless:
            if link not in ready:
                self._look(link, ready)
        return ready

    def _wait(self, timeout: float | None, ready: list[Link[LinkMessage] | int]) -> None:
        for fd, events in self._poll.poll(None if timeout is None else max(0.0, timeout * 1000)):
            owner = self._watched[fd]
            if owner is None:
                ready.append(fd)
            elif owner.end.is_steady:  # else `_look` asks it
                if events & WRITABLE:
                    owner.flush()
                if events & ~WRITABLE:
                    ready.append(owner)

    def watch(self, link: Link[Reply], fd: int, events: int) -> None:
        """For `Link`: what the loop waits for at one of its descriptors; 0: nothing any more."""
        if events:
            self._watched[fd] = link
            self._poll.register(fd, events)
        elif self._watched.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def forget(self, link: Link[Reply]) -> None:
        """For `Link.close`."""
        self._links.pop(link, None)

    def _look(self, link: Link[LinkMessage], ready: list[Link[LinkMessage] | int]) -> float | None:
        """Let an end that no descriptor speaks for go on; how long to wait for it at most."""
        wish = link.end.prepare()
        if wish == 0.0:
            link.flush()
        if link.end.has_news:
            ready.append(link)
        return wish
