"""A daemon on another host, or at least met over a network: no process here, no lock, only a link.

The right to drive it is a lease (`protocol.lease`), which every message of its driver renews. That
it is gone is known from the connection: heartbeats end one that is cut.
"""

from collections.abc import Sequence
from typing import Final

from launch.daemon_process import Event, Present
from launch.events import Role
from protocol.errors import DaemonAbsent, DaemonError
from protocol.messages import Leave


class Far:
    """One life of such a daemon."""

    may_come_later: Final = True
    log: Final = ""
    pid: Final = 0
    fds: Final[tuple[int, ...]] = ()

    def __init__(self, address: str, opening: Sequence[Leave]) -> None:
        self._address = address
        self.opening = tuple(opening)
        self.deadline: float | None = None
        self.has_ended = False

    def start(self) -> list[Event]:
        """Hello waits in the link until there is a connection."""
        return [Present()]

    def absent(self, role: Role, seconds: float) -> DaemonError:
        """Nobody there, or one that loads for longer than that."""
        return DaemonAbsent(f"no {role} daemon at {self._address} answered within {seconds:g} s")

    def on_readable(self, fd: int) -> list[Event]:  # pragma: no cover -- it has no descriptor
        """Never."""
        del fd
        return []

    def on_deadline(self) -> list[Event]:  # pragma: no cover -- it has no deadline
        """Never."""
        return []

    def terminate(self) -> None:
        """Its life is over, and nothing else."""
        self.has_ended = True

    def kill(self) -> None:
        """The same; it is asked to leave over the next link."""
        self.terminate()

    def close(self) -> None:
        """Its lease ends by itself."""
        self.terminate()
