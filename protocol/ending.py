"""A daemon that is told to end: signals that wake its loop, and are looked at between calls."""

import signal
import socket
from types import FrameType, TracebackType
from typing import Any, Final, Self

from protocol.errors import DaemonError

ENDING_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Ended(DaemonError):
    """The daemon was told to end while it was loading; no failure."""

    code = "ended"
    exit_code = 0


class EndingSignals:
    """Armed inside a ``with`` in the main thread; `fds` belong into the poll loop."""

    def __init__(self) -> None:
        self._reason = ""
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup: tuple[socket.socket, socket.socket] | None = None
        self._wakeup_before = -1

    def __enter__(self) -> Self:
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        writer.setblocking(False)
        self._wakeup = (reader, writer)
        self._wakeup_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in ENDING_SIGNALS:
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
        for end in self._wakeup or ():
            end.close()
        self._wakeup = None

    @property
    def reason(self) -> str:
        """Why to end, or an empty string."""
        return self._reason

    @property
    def fds(self) -> tuple[int, ...]:
        """What to wait for beside the work; `ended` reads them."""
        return () if self._wakeup is None else (self._wakeup[0].fileno(),)

    def ended(self) -> bool:
        """Look, without waiting, whether a signal came."""
        self._drain_wakeup()
        return bool(self._reason)

    def check(self) -> None:
        """Raise Ended when it is time; for long work outside the poll loop, such as loading."""
        if self.ended():
            raise Ended(self._reason)

    def _told(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._reason = f"told to end by {signal.Signals(number).name}"

    def _drain_wakeup(self) -> None:
        if self._wakeup is None:
            return
        try:
            while self._wakeup[0].recv(4096):
                pass
        except BlockingIOError:
            return
