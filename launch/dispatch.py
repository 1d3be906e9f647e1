"""From what sessions ask to messages that are sent: whose turn it is, and how long it may take."""

from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final

from launch.crew import Crew
from launch.events import Request, Role
from launch.patience import Patience
from launch.peer import Listed
from launch.turns import ComputeItem, Turns
from protocol.messages import (
    Close,
    CloseItem,
    Ingest,
    IngestItem,
    Open,
    OpenItem,
    Prefill,
    PrefillItem,
    Propose,
    ProposeItem,
    Replay,
    ReplayItem,
    Verify,
    VerifyItem,
)

MESSAGES: Final[dict[type[Request], type[Listed]]] = {
    OpenItem: Open,
    PrefillItem: Prefill,
    ReplayItem: Replay,
    IngestItem: Ingest,
    ProposeItem: Propose,
    VerifyItem: Verify,
    CloseItem: Close,
}
COMPUTE: Final = (Prefill, Replay, Ingest, Propose, Verify)
AT_ONCE: Final = (OpenItem, CloseItem)


class Dispatch:
    """Compute waits for its turn; opening and closing do not.

    What cannot be asked now, since the draft is late with something else, is handed to `withdraw`:
    its session goes on without.
    """

    def __init__(
        self, crew: Crew, patience: Patience, withdraw: Callable[[ComputeItem], None]
    ) -> None:
        self._crew = crew
        self._patience = patience
        self._withdraw = withdraw
        self._turns = Turns()
        self._answered: deque[tuple[Role, Listed, float]] = deque()

    def share(self, *, shared: bool) -> None:
        """Whether both daemons compute on the same cores."""
        self._turns.shared = shared

    def send(self, role: Role, item: Request) -> None:
        """Send, or wait for a turn."""
        if isinstance(item, AT_ONCE):
            self._turns.drop(role, item.sequence)
            if isinstance(item, CloseItem):
                self._turns.alone.discard(item.sequence)
            self._post(role, type(item), (item,))
        elif self._turns.is_overdue(role):
            self._withdraw(item)
        else:
            self._turns.ask(role, item)

    def grant(self) -> None:
        """Send what has its turn now."""
        for batch in self._turns.grant():
            self._post(batch.role, batch.kind, batch.items)

    def answered(self, role: Role, asked: Listed, seconds: float) -> None:
        """The daemon has answered, `seconds` after it was asked; its turn is over."""
        if isinstance(asked, COMPUTE):
            self._turns.done(role)
        self._answered.append((role, asked, seconds))

    def settle(self) -> None:
        """Learn how long answers take; when nothing waits for what is done here."""
        while self._answered:
            self._patience.note(*self._answered.popleft())

    def late(self, role: Role, asked: Listed) -> None:
        """The soft deadline has passed: others need not wait for this turn to end."""
        if isinstance(asked, COMPUTE):
            for item in self._turns.overdue(role):
                self._withdraw(item)

    def lost(self, role: Role) -> None:
        """The daemon is gone, with its queue and its turn; what a draft had taken in as well."""
        self.settle()
        self._turns.clear(role)
        if role == "target":
            self._turns.drop_all("draft")  # no session waits for it any more
        self._patience.forget_all()

    def isolate(self, sequences: Collection[int]) -> None:
        """One of these ended the target: from now on each is asked about alone."""
        self._turns.alone.update(sequences)

    def _post(self, role: Role, kind: type[Request], items: tuple[Any, ...]) -> None:
        target, draft = self._crew.lives
        message = MESSAGES[kind](target_life=target, draft_life=draft, items=items)
        self._crew.send(role, message, partial(self._patience.allow, role, message))
