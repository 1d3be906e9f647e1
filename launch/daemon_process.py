"""What a crew asks of a daemon's process: of one that it spawned, or of one that runs on its own.

`launch.process.Child` and `launch.attached.Attached` answer each in their way; nothing else in
`launch` knows which of the two it has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from launch.events import Role
from launch.process import Exited
from protocol.errors import DaemonError
from protocol.messages import LinkMessage
from protocol.status import Status


@dataclass(frozen=True)
class Present:
    """A daemon that was not started here is there: it serves, or loads still. Greet it."""


@dataclass(frozen=True)
class Lost:
    """A daemon that was not started here has ended, or may not be driven: why."""

    error: DaemonError


Event = Status | Exited | Present | Lost


class DaemonProcess(Protocol):
    """One life of one daemon. Nothing here blocks, except `close`, within its deadlines."""

    deadline: float | None  # when `on_deadline` is to be called, on time.monotonic()'s clock

    @property
    def opening(self) -> Sequence[LinkMessage]:
        """What is sent before Hello, without an answer."""
        ...

    @property
    def may_come_later(self) -> bool:
        """Whether a daemon that never served is waited for."""
        ...

    @property
    def pid(self) -> int:
        """0 while it is not known."""
        ...

    @property
    def log(self) -> str:
        """The end of what it wrote; empty where it keeps its log itself."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether another life may begin."""
        ...

    @property
    def fds(self) -> tuple[int, ...]:
        """What to watch now."""
        ...

    def start(self) -> Sequence[Event]:
        """Bring it about; raises DaemonError when that cannot be."""
        ...

    def absent(self, role: Role, seconds: float) -> DaemonError:
        """What to report when it did not serve within so many seconds of its start."""
        ...

    def on_readable(self, fd: int) -> Sequence[Event]:
        """Take what is there, without waiting."""
        ...

    def on_deadline(self) -> Sequence[Event]:
        """Call when `deadline` has passed."""
        ...

    def terminate(self) -> None:
        """Its life is over; it is asked to end, if that is ours to ask."""
        ...

    def kill(self) -> None:
        """The same for one that cannot be trusted to listen."""
        ...

    def close(self) -> object:
        """Let go of it for certain."""
        ...
