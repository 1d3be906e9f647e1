"""The two streams of the process: asks come in as lines, and lines go out."""

import os
import select
import time
from collections import deque
from typing import Final

import msgspec

from protocol.config import Deadlines
from protocol.ending import Ended, EndingSignals
from protocol.errors import ProtocolError
from protocol.training import MAX_LINE, Ask, CollectLine

PIECE: Final = 1 << 16
LOOK_MS: Final = 1000  # how long a wait goes without a look at the parent


class Asks:
    """Lines of standard input, read no further ahead than is asked for."""

    def __init__(self, fd: int, endings: EndingSignals) -> None:
        self._fd, self._endings = fd, endings
        self._begun = bytearray()  # of a line that has not ended
        self._whole: deque[bytes] = deque()
        self.at_end = False  # nothing more will come than what waits

    def next(self, *, wait: bool) -> Ask | None:
        """The next one; None: there is none now, or with `wait` none before the end.

        Raises Ended when it is time to end, ProtocolError for what is no ask.
        """
        while not self._whole and not self.at_end:
            if not self._readable(LOOK_MS if wait else 0):
                if not wait:
                    return None
                continue
            self._read()
        if not self._whole:
            return None
        line = self._whole.popleft()
        try:
            return msgspec.json.decode(line, type=Ask)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"not an ask: {error}") from error

    def _readable(self, milliseconds: int) -> bool:
        self._endings.check()
        poller = select.poll()
        for fd in (self._fd, *self._endings.fds):
            poller.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(milliseconds)}
        self._endings.check()
        return self._fd in ready

    def _read(self) -> None:
        piece = os.read(self._fd, PIECE)
        self.at_end = not piece
        *ended, rest = piece.split(b"\n")
        for part in ended:
            self._whole.append(bytes(self._begun + part))
            self._begun.clear()
        self._begun += rest
        if self.at_end and self._begun:
            raise ProtocolError(
                f"the last line ends after {len(self._begun)} bytes, without a newline"
            )
        if len(self._begun) > MAX_LINE:
            raise ProtocolError(f"a line of more than {MAX_LINE:,} bytes")


class Out:
    """Where lines go, a descriptor that is not its own."""

    def __init__(self, fd: int, endings: EndingSignals) -> None:
        self._fd, self._endings = fd, endings
        os.set_blocking(fd, False)

    def write(self, line: CollectLine) -> None:
        """Write one line, however long its reader takes; Ended where he is gone, or it is time."""
        data = memoryview(msgspec.json.encode(line) + b"\n")
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:
                self._wait()
            except BrokenPipeError:
                raise Ended("nobody reads the answers") from None

    def _wait(self) -> None:
        """Until there is room; once it is time to end, no longer than an ending may take."""
        poller = select.poll()
        poller.register(self._fd, select.POLLOUT)
        until = time.monotonic() + Deadlines().terminate
        while not poller.poll(LOOK_MS):
            if not self._endings.ended():
                until = time.monotonic() + Deadlines().terminate
            elif time.monotonic() > until:
                raise Ended(self._endings.reason)
