"""Standard output as a stream of lines for `launch`."""

import os
import select
from collections.abc import Callable
from typing import Final

import msgspec

from protocol.training import TrainLine

PATIENCE_MS: Final = 500


class Lines:
    """Writes whole lines, also to a parent that is slow to read them; owns `fd`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        os.set_blocking(fd, False)

    def write(self, line: TrainLine, check: Callable[[], None]) -> None:
        """Write one line; `check` is called again and again while nobody reads, and may raise.

        A parent that is gone misses it: whoever watches the parent ends this process.
        """
        left = memoryview(msgspec.json.encode(line) + b"\n")
        poller = select.poll()
        poller.register(self._fd, select.POLLOUT)
        while left:
            if not poller.poll(PATIENCE_MS):
                check()
                continue
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:
                continue
            except OSError:
                return

    def close(self) -> None:
        os.close(self._fd)
