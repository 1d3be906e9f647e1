"""A client's connection to a supervisor, both halves: one Unix stream socket, messages in frames.

A frame is a length (four bytes, little-endian) and one message of `protocol.codec`. Not ZeroMQ:
here the end of a connection is an event, so that a client that dies cancels what it asked for, and
what a slow client has not read waits in a queue that is its own and bounded.
"""

import select
import socket
import struct
import time
from collections import deque
from pathlib import Path
from typing import Final, Generic, TypeVar

from protocol import private_socket
from protocol.codec import MAX_MESSAGE_BYTES, decode, encode
from protocol.errors import (
    ConfigError,
    PermissionRefused,
    ProtocolError,
    Unavailable,
)
from protocol.link_settings import check_socket_path
from protocol.messages import Message
from protocol.private_socket import check_peer

MAX_OUTBOX_BYTES: Final = 4 << 20  # of one connection, unread by its other end
MAX_READ_BYTES: Final = 1 << 18  # taken in one turn, so that nobody holds up the others
BACKLOG: Final = 16
_LENGTH: Final = struct.Struct("<I")

Received = TypeVar("Received", bound=Message)


class Connection(Generic[Received]):
    """One end, for a loop that watches `fd`; it never blocks. `types` are what may come in."""

    def __init__(self, end: socket.socket, types: tuple[type[Received], ...]) -> None:
        end.setblocking(False)
        self._socket = end
        self._types = types
        self._incoming = bytearray()
        self._outbox: deque[bytes] = deque()
        self._sent = 0  # of the outbox's first frame
        self._unread = 0  # bytes in the outbox
        self.ended = False  # the other end is gone; whole messages may still have come before

    @property
    def fd(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether to call `flush` when the socket can be written."""
        return bool(self._outbox)

    @property
    def is_full(self) -> bool:
        """Whether the other end has read so little that no more should be queued for it."""
        return self._unread >= MAX_OUTBOX_BYTES

    def send(self, message: Message) -> None:
        """Send, or queue. Whoever sends more than a last word looks at `is_full` before."""
        data = encode(message)
        frame = _LENGTH.pack(len(data)) + data
        self._outbox.append(frame)
        self._unread += len(frame)
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as it is taken."""
        while self._outbox and not self.ended:
            first = self._outbox[0]
            try:
                self._sent += self._socket.send(
                    memoryview(first)[self._sent :], socket.MSG_NOSIGNAL
                )
            except BlockingIOError:
                return
            except OSError:
                self.ended = True
                return
            if self._sent == len(first):
                self._outbox.popleft()
                self._unread -= len(first)
                self._sent = 0

    def receive(self) -> list[Received]:
        """The messages that are whole by now; `ended` afterwards, where there was an end.

        Raises ProtocolError for what is no message, after which nothing more can be read.
        """
        self._read()
        found: list[Received] = []
        while len(self._incoming) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming)
            if length > MAX_MESSAGE_BYTES:
                raise ProtocolError(f"a frame of {length} bytes; at most {MAX_MESSAGE_BYTES} pass")
            stop = _LENGTH.size + length
            if len(self._incoming) < stop:
                break
            frame = bytes(self._incoming[_LENGTH.size : stop])
            del self._incoming[:stop]
            found.append(decode(frame, self._types))
        return found

    def drain(self, seconds: float) -> None:
        """Wait at most so long until the other end has taken what was sent; for a last word."""
        deadline = time.monotonic() + seconds
        poller = select.poll()
        poller.register(self._socket, select.POLLOUT)
        self.flush()
        while self._outbox and not self.ended and (left := deadline - time.monotonic()) > 0:
            poller.poll(left * 1000)
            self.flush()

    def close(self) -> None:
        """Drop what was not sent; closing twice is harmless."""
        self._outbox.clear()
        self._socket.close()

    def _read(self) -> None:
        try:
            data = self._socket.recv(MAX_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.ended = self.ended or not data
        self._incoming += data


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
