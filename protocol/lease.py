"""The right to drive a daemon from another host: a lease, and a number that only grows. Pure.

No lock of one kernel reaches there. The driver holds the right for as long as it is heard from;
the daemon's own computing does not count, since it can hear nobody meanwhile. When the lease has
ended another supervisor may take it, under a greater life, and the old driver's messages are then
refused by their number, however late they come.
"""

import time
from collections.abc import Callable

from protocol.errors import NotTheDriver, StaleMessage
from protocol.right import Right


class Lease(Right):
    """Ends `seconds` after the driver was last heard, on `clock`; one driver at a time."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._seconds = seconds
        self._clock = clock
        self._owner: int | None = None
        self._until = clock()

    def claim(self, life: int, owner: int) -> None:
        """The driver itself may begin a new life at any time, another one when the lease is over.

        Raises NotTheDriver with the seconds left, or StaleMessage with both lives.
        """
        left = self._until - self._clock()
        if self._owner not in (None, owner) and left > 0.0:
            raise NotTheDriver(
                f"another supervisor drives this daemon; its lease ends in {left:.1f} s"
            )
        if life <= self.life:
            raise StaleMessage(f"life {life} is not above the last one, {self.life}")
        self.life, self._owner = life, owner
        self.heard()

    def heard(self) -> None:
        """The lease begins anew."""
        self._until = max(self._until, self._clock() + self._seconds)

    def worked(self, seconds: float) -> None:
        """Computing is no silence of the driver."""
        self._until += seconds
