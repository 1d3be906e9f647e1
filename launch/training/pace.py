"""How fast something grows: over the last minute, so that no start and no pause stay in it."""

from collections import deque
from typing import Final

WINDOW_SECONDS: Final = 60.0
NOTE_SECONDS: Final = 1.0  # between two that are remembered


class Pace:
    """Of one count that only grows."""

    def __init__(self) -> None:
        self._notes: deque[tuple[float, float]] = deque()
        self._last = (0.0, 0.0)

    def note(self, now: float, count: float) -> None:
        """So many at `now` seconds of a clock."""
        self._last = (now, count)
        if not self._notes or now - self._notes[-1][0] >= NOTE_SECONDS:
            self._notes.append(self._last)
        while len(self._notes) > 1 and self._notes[1][0] <= now - WINDOW_SECONDS:
            self._notes.popleft()

    @property
    def rate(self) -> float:
        """A second; at first over a whole second, so that a first step is no leap."""
        if not self._notes:
            return 0.0
        then, before = self._notes[0]
        now, count = self._last
        return (count - before) / max(now - then, 1.0)
