"""Messages over a Unix stream socket: each is four bytes of length, little-endian, and its bytes.

One end of one connection, for a loop that watches its descriptor; nothing here ever blocks.
"""

import socket
import struct
from collections import deque
from typing import Final

from protocol.codec import MAX_MESSAGE_BYTES
from protocol.errors import ProtocolError

MAX_READ_BYTES: Final = 1 << 16  # taken in one turn; more would be mapped and unmapped each time
_LENGTH: Final = struct.Struct("<I")


class Frames:
    """Cuts what comes in into messages, and keeps what was not taken at once in order."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._torn = bytearray()  # the beginning of a message
        self._outbox: deque[bytes] = deque()
        self._sent = 0  # of the outbox's first frame
        self.unsent_bytes = 0
        self.ended = False  # the other end is gone; whole messages may still have come before

    @property
    def fd(self) -> int:
        return self._socket.fileno()

    @property
    def unsent(self) -> int:
        """Messages that were not taken whole yet: call `flush` when the socket can be written."""
        return len(self._outbox)

    def send(self, data: bytes, *, most: int | None = None) -> bool:
        """Send, or queue; False, and nothing of it was, at an end or where `most` are unsent."""
        frame, waiting = _LENGTH.pack(len(data)) + data, len(self._outbox)
        if self.ended or (most is not None and waiting >= most):
            return False
        sent = 0
        if not waiting:
            try:
                sent = self._socket.send(frame, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                pass
            except OSError:
                self.ended = True
                return False
        if sent < len(frame):
            self._sent = self._sent if waiting else sent
            self._outbox.append(frame)
            self.unsent_bytes += len(frame)
        return True

    def flush(self) -> None:
        """Send what waits, as far as it is taken."""
        while self._outbox and not self.ended:
            first = self._outbox[0]
            rest = memoryview(first)[self._sent :]
            try:
                self._sent += self._socket.send(rest, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                self.ended = True
                return
            if self._sent == len(first):
                self._outbox.popleft()
                self.unsent_bytes -= len(first)
                self._sent = 0

    def receive(self) -> list[bytes]:
        """The messages that are whole by now; `ended` afterwards, where there was an end.

        Raises ProtocolError for a length that is too large, after which nothing can be read.
        """
        try:
            data = self._socket.recv(MAX_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.ended = True
            return []
        size = len(data) - _LENGTH.size
        # Most often what comes is one message, and the whole of it.
        if size >= 0 and not self._torn and _LENGTH.unpack_from(data)[0] == size:
            return [data[_LENGTH.size :]]
        self._torn += data
        return self._cut()

    def _cut(self) -> list[bytes]:
        found: list[bytes] = []
        start = 0
        while len(self._torn) - start >= _LENGTH.size:
            stop = start + _LENGTH.size + _length(self._torn, start)
            if len(self._torn) < stop:
                break
            found.append(bytes(self._torn[start + _LENGTH.size : stop]))
            start = stop
        del self._torn[:start]
        return found

    def close(self) -> None:
        """Drop what was not sent; closing twice is harmless."""
        self._outbox.clear()
        self._socket.close()


def _length(data: bytes | bytearray, start: int = 0) -> int:
    if len(data) - start < _LENGTH.size:
        return MAX_MESSAGE_BYTES  # not known yet; no message ends here
    length = int(_LENGTH.unpack_from(data, start)[0])
    if length > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a frame of {length} bytes; at most {MAX_MESSAGE_BYTES} pass")
    return length
