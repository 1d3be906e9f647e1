"""Ending signals as something that a poll loop waits for: a handler only records them."""

import signal
import socket
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, ClassVar, Final, Self

from protocol.errors import InternalError

ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class CaughtSignals:
    """Armed inside a ``with`` in the main thread: a signal is given to `_record`, not raised.

    Put `fd` into the loop, so that a signal wakes it, and `drain` what woke it.
    """

    CAUGHT: ClassVar[tuple[signal.Signals, ...]] = ENDING

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._pair: tuple[socket.socket, socket.socket] | None = None
        self._wakeup_before = -1

    def __enter__(self) -> Self:
        reader, writer = self._pair = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in self.CAUGHT:
            self._before[number] = signal.signal(number, self._told)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        for end in self._pair or ():
            end.close()
        self._pair = None

    @property
    def fd(self) -> int:
        """Readable when a signal came."""
        if self._pair is None:
            raise InternalError("the signals are not caught now")
        return self._pair[0].fileno()

    def drain(self) -> None:
        """Take what woke the loop."""
        if self._pair is None:
            return
        with suppress(BlockingIOError):
            while self._pair[0].recv(4096):
                pass

    def _record(self, number: signal.Signals) -> None:
        """For each signal that comes, inside its handler."""
        raise NotImplementedError

    def _told(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._record(signal.Signals(number))
