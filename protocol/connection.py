"""A client's connection to a supervisor, both halves: one Unix stream socket, messages in frames.

The end of a connection is an event, so that a client that dies cancels what it asked for, and what
a slow client has not read waits in a queue that is its own and bounded.
"""

import select
import socket
import time
from pathlib import Path
from typing import Final, Generic, TypeVar

from protocol import private_socket
from protocol.codec import decode, encode
from protocol.errors import (
    ConfigError,
    PermissionRefused,
    Unavailable,
)
from protocol.framing import Frames
from protocol.link_settings import check_socket_path
from protocol.messages import Message
from protocol.private_socket import check_peer

MAX_OUTBOX_BYTES: Final = 4 << 20  # of one connection, unread by its other end
BACKLOG: Final = 16

Received = TypeVar("Received", bound=Message)


class Connection(Generic[Received]):
    """One end, for a loop that watches `fd`; it never blocks. `types` are what may come in."""

    def __init__(self, end: socket.socket, types: tuple[type[Received], ...]) -> None:
        self._frames = Frames(end)
        self._types = types

    @property
    def fd(self) -> int:
        return self._frames.fd

    @property
    def ended(self) -> bool:
        """The other end is gone; whole messages may still have come before."""
        return self._frames.ended

    @property
    def has_unsent(self) -> bool:
        """Whether to call `flush` when the socket can be written."""
        return self._frames.unsent > 0

    @property
    def is_full(self) -> bool:
        """Whether the other end has read so little that no more should be queued for it."""
        return self._frames.unsent_bytes >= MAX_OUTBOX_BYTES

    def send(self, message: Message) -> None:
        """Send, or queue. Whoever sends more than a last word looks at `is_full` before."""
        self._frames.send(encode(message))

    def flush(self) -> None:
        """Send what waits, as far as it is taken."""
        self._frames.flush()

    def receive(self) -> list[Received]:
        """The messages that are whole by now; `ended` afterwards, where there was an end.

        Raises ProtocolError for what is no message, after which nothing more can be read.
        """
        return [decode(frame, self._types) for frame in self._frames.receive()]

    def drain(self, seconds: float) -> None:
        """Wait at most so long until the other end has taken what was sent; for a last word."""
        deadline = time.monotonic() + seconds
        poller = select.poll()
        poller.register(self.fd, select.POLLOUT)
        self.flush()
        while self.has_unsent and not self.ended and (left := deadline - time.monotonic()) > 0:
            poller.poll(left * 1000)
            self.flush()

    def close(self) -> None:
        """Drop what was not sent; closing twice is harmless."""
        self._frames.close()


def listen(path: Path) -> socket.socket:
    """Listen at `path`, for this user alone; the run directory's lock must be held.

    Raises ConfigError. A file that an earlier owner left is replaced.
    """
    check_socket_path(path)
    path.unlink(missing_ok=True)
    return private_socket.bind(path, socket.SOCK_STREAM, BACKLOG, ConfigError)


def accept(
    listener: socket.socket, types: tuple[type[Received], ...]
) -> Connection[Received] | None:
    """The next client; None when none waits any more, or none can be taken in now.

    Raises PermissionRefused for another user's.
    """
    try:
        end, _ = listener.accept()
    except OSError:  # also where this process has no descriptor left for it
        return None
    return _of_this_user(end, types)


def connect(path: Path, types: tuple[type[Received], ...]) -> Connection[Received]:
    """Connect to the supervisor at `path`; raises Unavailable or PermissionRefused."""
    # Not waiting: one that takes nobody any more is as good as gone.
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        end.connect(str(path))
    except PermissionError as error:
        end.close()
        raise PermissionRefused(f"{path}: {error.strerror}") from error
    except OSError as error:
        end.close()
        raise Unavailable(f"no supervisor answers at {path}: {error.strerror}") from error
    return _of_this_user(end, types)


def _of_this_user(end: socket.socket, types: tuple[type[Received], ...]) -> Connection[Received]:
    try:
        check_peer(end)
    except BaseException:
        end.close()
        raise
    return Connection(end, types)
