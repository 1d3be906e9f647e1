"""A daemon that is told to end: signals that wake its loop, and are looked at between calls."""

import signal

from protocol.errors import DaemonError
from protocol.signals import CaughtSignals


class Ended(DaemonError):
    """The daemon was told to end while it was loading; no failure."""

    code = "ended"
    exit_code = 0


class EndingSignals(CaughtSignals):
    """Armed inside a ``with`` in the main thread; `fds` belong into the poll loop."""

    def __init__(self) -> None:
        super().__init__()
        self._reason = ""

    @property
    def reason(self) -> str:
        """Why to end, or an empty string."""
        return self._reason

    @property
    def fds(self) -> tuple[int, ...]:
        """What to wait for beside the work; `ended` reads them."""
        return () if self._pair is None else (self.fd,)

    def ended(self) -> bool:
        """Look, without waiting, whether a signal came."""
        self.drain()
        return bool(self._reason)

    def check(self) -> None:
        """Raise Ended when it is time; for long work outside the poll loop, such as loading."""
        if self.ended():
            raise Ended(self._reason)

    def _record(self, number: signal.Signals) -> None:
        self._reason = f"told to end by {number.name}"
