"""When things are due: one heap, whose nearest entry is the poll loop's timeout."""

import heapq
import itertools
from collections.abc import Callable
from typing import Final

_SPARE: Final = 64  # cancelled entries that may lie in the heap before it is rebuilt


class Timer:
    """One deadline; cancelling is cheap, and what is cancelled never fires."""

    __slots__ = ("action", "when")

    def __init__(self, when: float, action: Callable[[], None] | None) -> None:
        self.when = when
        self.action = action  # None: fired, cancelled, or never set


class DeadlineHeap:
    """All deadlines of one loop, on one monotonic clock that the caller reads."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._cancelled = 0

    def __len__(self) -> int:
        """How many are still due."""
        return len(self._heap) - self._cancelled

    def add(self, when: float, action: Callable[[], None]) -> Timer:
        """Call `action` from the first `expire` at or after `when`."""
        timer = Timer(when, action)
        heapq.heappush(self._heap, (when, next(self._order), timer))
        return timer

    def cancel(self, timer: Timer) -> None:
        """It will not fire; cancelling what has fired or was cancelled changes nothing."""
        if timer.action is None:
            return
        timer.action = None
        self._cancelled += 1
        if self._cancelled > _SPARE + len(self._heap) // 2:
            self._heap = [entry for entry in self._heap if entry[2].action is not None]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def nearest(self) -> float | None:
        """When the next one is due."""
        self._drop_cancelled()
        return self._heap[0][0] if self._heap else None

    def expire(self, now: float) -> None:
        """Fire what is due, in order; what an action adds for now fires as well."""
        self._drop_cancelled()
        while self._heap and self._heap[0][0] <= now:
            timer = heapq.heappop(self._heap)[2]
            action, timer.action = timer.action, None
            if action is not None:
                action()
            self._drop_cancelled()

    def _drop_cancelled(self) -> None:
        while self._heap and self._heap[0][2].action is None:
            heapq.heappop(self._heap)
            self._cancelled -= 1
