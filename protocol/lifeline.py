"""Die with the parent. Three cords: the parent-death signal, a pipe's end, and a guard thread.

The signal (`PR_SET_PDEATHSIG`) is immediate, but it is lost when the parent died before it was
asked for, and it follows the parent's *thread*. It is SIGCONT, so that a process which is stopped
goes on, to its end; the parent's number says whether that was meant. The pipe on standard input
ends whenever the parent does. Both make the poll loop leave in good order; the guard thread kills a
process whose loop does not come back in time, for instance from a kernel that hangs.
"""

import ctypes
import os
import select
import signal
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import ClassVar, Final, Self

from protocol.ending import EndingSignals
from protocol.signals import ENDING

PARENT_VARIABLE: Final = "DFLASHD_PARENT"  # the parent's pid, for the check after the signal is set
_PR_SET_PDEATHSIG: Final = 1


class ParentDeath(EndingSignals):
    """The first cord alone, for a process that is spoken to on its standard input."""

    CAUGHT: ClassVar[tuple[signal.Signals, ...]] = (*ENDING, signal.SIGCONT)

    def __init__(self) -> None:
        super().__init__()
        self._parent = os.getppid()

    def __enter__(self) -> Self:
        super().__enter__()
        _ask_for_parent_death_signal(signal.SIGCONT)
        if _is_adopted(os.environ):
            self._reason = "the parent ended before this process was ready"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _ask_for_parent_death_signal(0)
        super().__exit__(kind, error, traceback)

    def ended(self) -> bool:
        """Look, without waiting, whether a signal came or the parent is gone."""
        if not super().ended() and self.parent_is_gone():
            self._reason = "the parent is gone"
        return bool(self._reason)

    def parent_is_gone(self) -> bool:
        """Whether another process has become the parent, whatever else has been told."""
        return os.getppid() != self._parent

    def _record(self, number: signal.Signals) -> None:
        if number != signal.SIGCONT:
            super()._record(number)
        elif os.getppid() != self._parent:
            self._reason = "the parent has died"


class Lifeline(ParentDeath):
    """Armed inside a ``with`` in the main thread; `fds` belong into the poll loop.

    `stdin` is the read end of the pipe whose write end the parent holds. `grace` is how many
    seconds the process may go on without its parent; then `last_act` is called, and it is killed.
    """

    def __init__(
        self, *, grace: float, last_act: Callable[[], None] | None = None, stdin: int = 0
    ) -> None:
        super().__init__()
        self._grace = grace
        self._last_act = last_act
        self._stdin = stdin
        self._guard: _Guard | None = None

    def __enter__(self) -> Self:
        super().__enter__()
        self._guard = _Guard(self._stdin, self._grace, self._last_act)
        self._guard.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._guard is not None:
            self._guard.stop()
        super().__exit__(kind, error, traceback)

    @property
    def fds(self) -> tuple[int, ...]:
        """What to wait for beside the work; `ended` reads them."""
        return (*super().fds, self._stdin)

    def parent_is_gone(self) -> bool:
        """Whether the pipe has ended, whatever else has been told."""
        return _at_end(self._stdin)


class _Guard(threading.Thread):
    """Waits for the end of the pipe, then `grace` seconds, then kills its own process."""

    def __init__(self, stdin: int, grace: float, last_act: Callable[[], None] | None) -> None:
        super().__init__(name="lifeline guard", daemon=True)
        self._stdin = stdin
        self._grace = grace
        self._last_act = last_act
        self._stop_read, self._stop_write = os.pipe()

    def run(self) -> None:
        poller = select.poll()
        poller.register(self._stop_read, select.POLLIN)
        # No POLLIN: data would be reported again and again, and only the end matters here.
        poller.register(self._stdin, 0)
        if any(fd == self._stop_read for fd, _ in poller.poll()):
            return
        poller.unregister(self._stdin)
        if poller.poll(self._grace * 1000):
            return
        try:
            if self._last_act is not None:
                self._last_act()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)

    def stop(self) -> None:
        os.close(self._stop_write)
        self.join()
        os.close(self._stop_read)


def _is_adopted(environment: Mapping[str, str]) -> bool:
    """Whether the parent died before the parent-death signal was asked for."""
    parent = environment.get(PARENT_VARIABLE, "")
    return parent.isdecimal() and os.getppid() != int(parent)


def _ask_for_parent_death_signal(number: int) -> None:
    # A sandbox may refuse it; the pipe and the guard remain.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _at_end(fd: int) -> bool:
    """Whether the pipe has no writer left; what somebody wrote into it is thrown away."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    while poller.poll(0):
        try:
            if not os.read(fd, 4096):
                return True
        except OSError:
            return True
    return False
