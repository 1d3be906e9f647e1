"""The two ends of a daemon's control link, whatever carries it, and the one choice of that.

``ipc://`` is a Unix stream socket (`protocol.local_ends`), ``tcp://`` is ZeroMQ with CURVE
(`protocol.network_ends`), which is loaded only where an address asks for it. An end moves whole
messages as bytes; `protocol.client` and `protocol.server` know what they mean.
"""

from pathlib import Path
from typing import Protocol

from protocol.addresses import IPC, is_tcp, parse_tcp
from protocol.errors import DaemonError, ProtocolError
from protocol.keyring import Keyring
from protocol.keys import Role
from protocol.link_settings import Watch
from protocol.listening import Network
from protocol.local_ends import LocalCaller, LocalListener
from protocol.state import LinkName


class Caller(Protocol):
    """The supervisor's end; it tells the loop which descriptors to watch, and never blocks."""

    @property
    def trouble(self) -> DaemonError | None:
        """Why there is no connection now, where that is known."""
        ...

    @property
    def broken(self) -> DaemonError | None:
        """Why nothing that was sent may be answered any more, ever."""
        ...

    @property
    def is_steady(self) -> bool:
        """Whether the watched descriptors say all: `prepare` need not be called before a wait."""
        ...

    def prepare(self) -> float | None:
        """Called before a wait: for how many seconds at most to wait, None for ever.

        0 where `flush` may have come further.
        """
        ...

    @property
    def has_news(self) -> bool:
        """Whether there is something to receive, or it is broken, where no descriptor says so."""
        ...

    def want_write(self, *, wanted: bool) -> None:
        """Whether the loop also waits until a message is taken."""
        ...

    def send(self, data: bytes) -> bool:
        """Whether the message was taken; else it must be sent again once that is possible."""
        ...

    def flush(self) -> bool:
        """Go on with what was taken; whether another message would be."""
        ...

    def receive(self) -> list[bytes | ProtocolError]:
        """The messages that have come."""
        ...

    def close(self) -> None:
        """Drop what was not sent; closing twice is harmless."""
        ...


class Listener(Protocol):
    """The daemon's end: any number of peers, each by a name of its own."""

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        ...

    def has_message(self) -> bool:
        """Called before a wait: whether `receive` has something already."""
        ...

    def attend(self, fd: int, events: int) -> None:
        """A watched descriptor is ready."""
        ...

    def receive(self) -> tuple[bytes, str | None, bytes | ProtocolError] | None:
        """The next message with its sender and its role; None for one that may say anything."""
        ...

    def send(self, peer: bytes, data: bytes) -> str:
        """Queue a message, or say why not: the peer is gone, or does not read."""
        ...

    def close(self) -> None:
        """Give last replies a moment, then end every connection."""
        ...


def call(address: str, watch: Watch, role: Role, keyring: Keyring | None) -> Caller:
    """An end for the daemon that listens, or will listen, at `address`.

    Over a network the daemon of that `role` must prove to have the key that `keyring` knows of it;
    ConfigError without keys, except on the loopback interface.
    """
    if is_tcp(address):
        from protocol.network_ends import NetworkCaller  # noqa: PLC0415 - loads zmq

        return NetworkCaller(parse_tcp(address), watch, role, keyring)
    if not address.startswith(IPC):
        raise ProtocolError(f"{address}: an address begins with ipc:// or tcp://")
    return LocalCaller(Path(address.removeprefix(IPC)), watch)


def listen(place: Path | Network, watch: Watch, link: LinkName) -> Listener:
    """An end that is bound: a socket file for this user alone, or a network address.

    ConfigError where it cannot be bound, or where other hosts could connect without keys.
    """
    if isinstance(place, Path):
        return LocalListener(place, watch)
    from protocol.network_ends import NetworkListener  # noqa: PLC0415 - loads zmq

    return NetworkListener(place, watch, link)
