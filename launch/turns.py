"""Who computes next: daemons that share cores never do so at the same time. Pure.

Two torch processes with spinning threads on the same cores cost several times the time of one
after the other. So the supervisor grants a turn: one compute message at a time over both daemons
where they share cores, one for each where they do not. The queue is first come, first served, and
a session has at most one request in it, so that sessions take turns; requests of the head's verb
and daemon ride along in its message.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import msgspec

from launch.events import Request, Role
from protocol.messages import (
    HostFacts,
    IngestItem,
    PrefillItem,
    ProposeItem,
    ReplayItem,
    VerifyItem,
)

ComputeItem: TypeAlias = PrefillItem | ReplayItem | IngestItem | ProposeItem | VerifyItem

# How many sequences one message may carry. All of them wait for the last, so that a long prompt
# may not bring many others along.
BATCH: Final[Mapping[type[Request], int]] = {
    PrefillItem: 1,
    ReplayItem: 1,
    IngestItem: 4,
    ProposeItem: 8,
    VerifyItem: 8,
}


def shares_cores(one: HostFacts, other: HostFacts) -> bool:
    """Whether computing in one daemon slows the other; the same GPU counts as well."""
    return one.boot_id == other.boot_id and one.device == other.device


class Batch(msgspec.Struct, frozen=True):
    """One compute message to send now."""

    role: Role
    kind: type[Request]
    items: tuple[ComputeItem, ...]


class Turns:
    """The queue and the turns in use."""

    def __init__(self) -> None:
        self.shared = True  # until both daemons have said where they run
        self.alone: set[int] = set()  # sequences that share no message with another
        self._queue: deque[tuple[Role, ComputeItem]] = deque()
        self._busy: set[Role] = set()
        self._overdue: set[Role] = set()  # busy for so long that others go on meanwhile

    def ask(self, role: Role, item: ComputeItem) -> None:
        """Queue one sequence's request."""
        self._queue.append((role, item))

    def drop(self, role: Role, sequence: int) -> None:
        """Forget what `sequence` has queued for `role`; what was granted goes on."""
        self._keep(lambda queued, item: queued != role or item.sequence != sequence)

    def clear(self, role: Role) -> None:
        """The daemon is gone, with its queue and its turn."""
        self.drop_all(role)
        self.done(role)

    def drop_all(self, role: Role) -> None:
        """Forget what is queued for `role`; what was granted goes on."""
        self._keep(lambda queued, _: queued != role)

    def overdue(self, role: Role) -> tuple[ComputeItem, ...]:
        """It is late: the other may go on beside it. Returns its queue, which is forgotten."""
        self._overdue.add(role)
        queued = tuple(item for owner, item in self._queue if owner == role)
        self.drop_all(role)
        return queued

    def is_overdue(self, role: Role) -> bool:
        """Whether it is late with what it has."""
        return role in self._overdue

    def done(self, role: Role) -> None:
        """The daemon has answered; its turn is free."""
        self._busy.discard(role)
        self._overdue.discard(role)

    def grant(self) -> list[Batch]:
        """What may be sent now; each batch holds a turn until `done` or `clear`."""
        granted: list[Batch] = []
        while (head := self._next()) is not None:
            role, first = head
            kind = type(first)
            most = 1 if first.sequence in self.alone else BATCH[kind]
            taken: list[ComputeItem] = []
            kept: deque[tuple[Role, ComputeItem]] = deque()
            for queued, item in self._queue:
                fits = queued == role and type(item) is kind and len(taken) < most
                if fits and (not taken or item.sequence not in self.alone):
                    taken.append(item)
                else:
                    kept.append((queued, item))
            self._queue = kept
            self._busy.add(role)
            granted.append(Batch(role, kind, tuple(taken)))
        return granted

    def _next(self) -> tuple[Role, ComputeItem] | None:
        if not self._queue or (self.shared and self._busy - self._overdue):
            return None
        for entry in self._queue:
            if entry[0] not in self._busy:
                return entry
        return None

    def _keep(self, wanted: Callable[[Role, ComputeItem], bool]) -> None:
        self._queue = deque(entry for entry in self._queue if wanted(*entry))
