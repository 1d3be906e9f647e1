"""What a crew tells its owner, always from inside the owner's own poll loop."""

from typing import Protocol

from launch.events import Role
from launch.peer import Answer, Listed
from launch.plan import Loading
from protocol.errors import DaemonError


class Owner(Protocol):
    """The supervisor, as `launch.crew` sees it."""

    def on_loading(self, loading: Loading) -> None:
        """A step of a start, for a progress line."""
        ...

    def on_up(self, role: Role) -> None:
        """The daemon can be asked: the target is loaded, or the draft is paired with it."""
        ...

    def on_lost(self, role: Role, error: DaemonError, asked: Listed | None) -> None:
        """Nothing that was asked will be answered; `asked` is what it was at, if anything."""
        ...

    def on_answer(self, role: Role, asked: Listed, answer: Answer, seconds: float) -> None:
        """The answer to a message about sequences, `seconds` after it was sent."""
        ...

    def on_parked(self) -> None:
        """The process of a parked daemon has ended."""
        ...

    def on_candidate(self, error: DaemonError | None) -> None:
        """The draft that is to take over has loaded, or why it cannot."""
        ...

    def on_soft(self, role: Role, asked: Listed) -> None:
        """Its soft deadline has passed; the answer may still come."""
        ...

    def on_late(self, role: Role, asked: Listed) -> None:
        """Its deadline has passed; `on_lost` follows."""
        ...
