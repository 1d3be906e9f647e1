"""What one session has asked and not yet been answered: at most one request per daemon."""

from typing import Final

from launch.events import Accuse, Command, DeadlineExpired, Emit, Reply, Request, Result, Role, Send
from protocol.messages import (
    ClosedItem,
    CloseItem,
    IngestedItem,
    IngestItem,
    ItemFailed,
    OpenedItem,
    OpenItem,
    Piece,
    PrefilledItem,
    PrefillItem,
    Progress,
    ProposedItem,
    ProposeItem,
    ReplayedItem,
    ReplayItem,
    Verdict,
    VerifyItem,
)

ANSWERS: Final[dict[type[Request], type[Result]]] = {
    OpenItem: OpenedItem,
    PrefillItem: PrefilledItem,
    ReplayItem: ReplayedItem,
    IngestItem: IngestedItem,
    ProposeItem: ProposedItem,
    VerifyItem: Verdict,
    CloseItem: ClosedItem,
}


class Outstanding:
    """Writes Send commands, and tells the answer to one from a late, repeated or foreign reply.

    Every request has a round number of its own, except that a Verify shares its Propose's.
    """

    __slots__ = ("_commands", "_sequence", "asked", "late", "num_stale_replies", "round")

    def __init__(self, sequence: int, commands: list[Command]) -> None:
        self.round = 0
        self.num_stale_replies = 0
        self._sequence = sequence
        self._commands = commands
        self.asked: dict[Role, Request] = {}  # and is waited for
        self.late: Request | None = None  # the draft may still answer it; nothing waits for that

    def __bool__(self) -> bool:
        return bool(self.asked)

    def ask(self, role: Role, kind: type[Request], **fields: object) -> None:
        """Send under the next round number; whatever was asked of `role` before is forgotten."""
        self.round += 1
        self.ask_again(role, kind, **fields)

    def ask_again(self, role: Role, kind: type[Request], **fields: object) -> None:
        """Send under the present round number."""
        item = kind(sequence=self._sequence, round=self.round, **fields)  # type: ignore[arg-type]  # `kind` names them
        self.asked[role] = item
        self._commands.append(Send(role, item))

    def tell(self, message: Piece | Progress) -> None:
        """Tell the client."""
        self._commands.append(Emit(message))

    def accuse(self, role: Role, life: int, reason: str, *, sick: bool = True) -> None:
        """Say that this life of a daemon is not to be trusted; `sick`: that it should end."""
        self._commands.append(Accuse(role, life, reason, sick))

    def forget(self, role: Role) -> None:
        """Its daemon is gone; no answer will come."""
        self.asked.pop(role, None)
        if role == "draft":
            self.late = None

    def defer(self, number: int) -> bool:
        """Wait no longer for the draft's answer of this round; False when none is waited for."""
        late = self.withdraw(number)
        self.late = late or self.late
        return late is not None

    def withdraw(self, number: int) -> Request | None:
        """Take back what was asked of the draft in this round, if it is still waited for."""
        asked = self.asked.get("draft")
        if asked is None or asked.round != number:
            return None
        return self.asked.pop("draft")

    def expire(self, event: DeadlineExpired) -> Request | None:
        """The request whose deadline this is, which is forgotten; None when it was answered."""
        late = self.late
        if event.role == "draft" and late is not None and late.round == event.round:
            self.late = None
            return late
        asked = self.asked.get(event.role)
        if asked is None or asked.round != event.round:
            return None
        return self.asked.pop(event.role)

    def take(self, reply: Reply, target_life: int, draft_life: int) -> Request | None:
        """The request that `reply` answers, or None: then it is dropped and counted.

        A target's answer counts whatever draft lived meanwhile; its own life must be the same.
        """
        asked = self.asked.get(reply.role)
        if asked is None or not self._answers(reply, asked, target_life, draft_life):
            self.num_stale_replies += 1
            return None
        return self.asked.pop(reply.role)

    def take_late(self, reply: Reply, target_life: int, draft_life: int) -> Request | None:
        """The late request that `reply` answers, or None."""
        late = self.late
        if reply.role == "target" or late is None:
            return None
        if not self._answers(reply, late, target_life, draft_life):
            return None
        self.late = None
        return late

    def _answers(self, reply: Reply, asked: Request, target_life: int, draft_life: int) -> bool:
        item = reply.item
        return (
            item.round == asked.round
            and item.sequence == self._sequence
            and reply.target_life == target_life
            and (reply.role == "target" or reply.draft_life == draft_life)
            and isinstance(item, (ANSWERS[type(asked)], ItemFailed))
        )
