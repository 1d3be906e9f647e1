"""Signals as events of the poll loop: a handler only records, and the loop decides."""

import signal
import socket
from types import FrameType, TracebackType
from typing import Any, Final, Self

from protocol.errors import InternalError

CAUGHT: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Inside a ``with`` in the main thread, an ending signal is recorded instead of raised.

    Put `fd` and `on_ready` into the loop (`Supervisor.watch`), so that a signal wakes it, and ask
    `number` between steps. No message is ever cut in two by a Ctrl-C this way.
    """

    def __init__(self) -> None:
        self.number: signal.Signals | None = None  # the first signal that came
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1
        self._pair: tuple[socket.socket, socket.socket] | None = None

    def __enter__(self) -> Self:
        reader, writer = self._pair = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in CAUGHT:
            self._before[number] = signal.signal(number, self._record)
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
        for end in self._sockets():
            end.close()
        self._pair = None

    @property
    def fd(self) -> int:
        """Readable when a signal came."""
        return self._sockets()[0].fileno()

    def on_ready(self) -> None:
        """Take what woke the loop."""
        self._sockets()[0].recv(64)

    def _sockets(self) -> tuple[socket.socket, socket.socket]:
        if self._pair is None:
            raise InternalError("the signals are not caught now")
        return self._pair

    def _record(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.number is None:
            self.number = signal.Signals(number)
