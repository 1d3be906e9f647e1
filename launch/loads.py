"""How long a daemon may load: what its earlier lives took says. Pure."""

from typing import Final

from launch.events import Role
from protocol.config import Deadlines

FACTOR: Final = 10.0  # a cold disk is slower than a warm one


class Loads:
    """The first load has `Deadlines.load`, which a large model on a slow disk may need.

    Later ones have ``FACTOR * the slowest``, at least `load_least`, so that one which was stopped
    there is not waited for as long; each that was too slow doubles that, up to the first's.
    """

    def __init__(self, limits: Deadlines) -> None:
        self._limits = limits
        self._slowest: dict[Role, float] = {}
        self._late: dict[Role, int] = {}  # in a row

    def allow(self, role: Role) -> float:
        """Seconds for the next one."""
        slowest = self._slowest.get(role)
        if slowest is None:
            return self._limits.load
        usual = max(self._limits.load_least, FACTOR * slowest)
        return min(self._limits.load, usual * 2.0 ** min(self._late.get(role, 0), 16))

    def note(self, role: Role, seconds: float) -> None:
        """One was done in time."""
        self._slowest[role] = max(seconds, self._slowest.get(role, 0.0))
        self._late[role] = 0

    def note_late(self, role: Role) -> None:
        """One was not."""
        self._late[role] = self._late.get(role, 0) + 1

    def forget(self, role: Role) -> None:
        """What comes next is another daemon."""
        self._slowest.pop(role, None)
