"""What happens to a session, and what it asks for: events in, commands out."""

from dataclasses import dataclass
from typing import Final, Literal, Self, TypeAlias

import msgspec

from protocol.errors import DaemonError
from protocol.messages import (
    ClosedItem,
    CloseItem,
    DaemonRole,
    DraftHello,
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
    TargetHello,
    Verdict,
    VerifyItem,
)

Role: TypeAlias = DaemonRole
Cause: TypeAlias = Literal["lost", "parked", "swapped"]  # of a life's end; the first is a fault
Reason: TypeAlias = Literal["stop", "length", "cancelled"]
Request: TypeAlias = (
    OpenItem | PrefillItem | ReplayItem | IngestItem | ProposeItem | VerifyItem | CloseItem
)
Result: TypeAlias = (
    OpenedItem
    | PrefilledItem
    | ReplayedItem
    | IngestedItem
    | ProposedItem
    | Verdict
    | ClosedItem
    | ItemFailed
)

MAX_POSITIONS: Final = (1 << 31) - 1  # of a draft that states none


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What a session needs to know of the target of one life."""

    life: int
    vocab_size: int
    max_positions: int
    prefill_chunk: int
    ring_capacity: int
    max_width: int
    exact: Literal["native", "padded", "no"] = "no"
    tree_verify: bool = False
    tree_detail: str = ""
    rollback: Literal["", "fast", "replay"] = ""

    @classmethod
    def of(cls, hello: TargetHello) -> Self:
        return cls(
            hello.target_life,
            hello.vocab_size,
            hello.max_positions,
            hello.prefill_chunk,
            hello.ring_capacity,
            hello.max_width,
            hello.exact,
            hello.tree_verify,
            hello.tree_detail,
            hello.rollback,
        )


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """What a session needs to know of the draft of one life."""

    life: int
    block_size: int  # rows of the widest verify: the pending token and all it can propose
    context_window: int
    doubt: str = ""  # why it may be no draft for this target
    top_k: int = 0  # ids that it can state for each slot; 0: the best alone
    positions: int = MAX_POSITIONS  # that it takes, from 0 on

    @classmethod
    def of(cls, hello: DraftHello, doubt: str = "") -> Self:
        widest = hello.block_size + hello.sample_from_anchor
        rows = (widest, hello.context_window)
        positions = hello.max_positions or MAX_POSITIONS
        return cls(hello.draft_life, *rows, doubt, hello.top_k, positions)


# --- events ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """The request has its turn to begin; the first event of a session."""


class Reply(msgspec.Struct, frozen=True):
    """A daemon answered, stating the lives that it was asked under."""

    role: Role
    target_life: int
    draft_life: int
    item: Result


@dataclass(frozen=True, slots=True)
class DraftUp:
    """A draft is paired with the target and can open sequences."""

    facts: DraftFacts


@dataclass(frozen=True, slots=True)
class DraftDown:
    """The draft is gone: why, in words for `mode_reason`."""

    reason: str
    cause: Cause = "lost"


@dataclass(frozen=True, slots=True)
class TargetDown:
    """The target is gone, and everything it held; another life follows, unless it is `fatal`."""

    error: DaemonError
    fatal: bool = False
    cause: Cause = "lost"

    @property
    def is_fault(self) -> bool:
        return self.cause == "lost"


@dataclass(frozen=True, slots=True)
class TargetUp:
    """A new life of the target: what it must know of a sequence is run again."""

    facts: TargetFacts


@dataclass(frozen=True, slots=True)
class DeadlineExpired:
    """A daemon did not answer the request of this round in time."""

    role: Role
    round: int


@dataclass(frozen=True, slots=True)
class DraftLate:
    """The draft's soft deadline has passed: the round goes on, and its answer may still come."""

    round: int


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """What was to be asked of the draft in this round was not: it is late with something else."""

    round: int


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """The client wants no more of it."""


Event: TypeAlias = (
    Start
    | Reply
    | DraftUp
    | DraftDown
    | TargetDown
    | TargetUp
    | DeadlineExpired
    | DraftLate
    | Withdrawn
    | CancelRequested
)

# --- commands --------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True):
    """Ask a daemon; its reply, its deadline or its death comes back as an event."""

    role: Role
    item: Request


class Emit(msgspec.Struct, frozen=True):
    """Tell the client: a progress mark, or tokens that are final."""

    message: Piece | Progress


@dataclass(frozen=True, slots=True)
class Finish:
    """The request ended well and holds nothing in either daemon; the last command."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Fail:
    """The request failed and holds nothing in either daemon; the last command."""

    error: DaemonError


@dataclass(frozen=True, slots=True)
class Accuse:
    """A daemon of this life answered what cannot be right: it should be started again.

    One that is not `sick` could not do what was asked; another life may, of the same process.
    """

    role: Role
    life: int
    reason: str
    sick: bool = True


Command: TypeAlias = Send | Emit | Accuse | Finish | Fail
