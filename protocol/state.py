"""Which message is legal when: one table per link, for the life of one sequence.

Both ends can follow it: the supervisor advances when it sends and when it receives, a daemon when
it receives and when it answers. The diagram in ``docs/protocol.md`` is drawn from these tables.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Final, Literal, get_args

from protocol.errors import ProtocolError
from protocol.messages import (
    Accepted,
    Attach,
    Attached,
    Cancel,
    Close,
    Closed,
    Denied,
    Done,
    DraftHello,
    Embed,
    Embedded,
    Failed,
    Finished,
    Hello,
    Ingest,
    Ingested,
    Item,
    ItemFailed,
    Leave,
    Message,
    Open,
    Opened,
    Pair,
    Paired,
    Park,
    Piece,
    Prefill,
    Prefilled,
    Progress,
    Project,
    Projected,
    Propose,
    Proposed,
    Refused,
    Replay,
    Replayed,
    Rows,
    RowsSent,
    Status,
    StatusReport,
    Submit,
    Swap,
    TargetHello,
    Unpark,
    Verified,
    Verify,
    Watch,
    Welcome,
)

LinkName = Literal["target", "draft"]

TargetRequest = Hello | Open | Prefill | Replay | Verify | Close
DraftRequest = Hello | Pair | Open | Ingest | Propose | Close
TargetReply = TargetHello | Opened | Prefilled | Replayed | Verified | Closed | Failed
DraftReply = DraftHello | Paired | Opened | Ingested | Proposed | Closed | Failed
ClientRequest = Submit | Cancel | Status | Watch | Park | Unpark | Swap
ClientReply = (
    Welcome | Accepted | Progress | Piece | Finished | Refused | Done | Denied | StatusReport
)
FeatureRequest = Attach | Rows | Embed | Project  # of a draft on another host, to its target
AnyTargetRequest = TargetRequest | FeatureRequest
FeatureReply = Attached | RowsSent | Embedded | Projected | Failed

# What each end of each link admits; `protocol.codec.decode` takes one of these.
TARGET_REQUESTS: Final[tuple[type[TargetRequest], ...]] = get_args(TargetRequest)
DRAFT_REQUESTS: Final[tuple[type[DraftRequest], ...]] = get_args(DraftRequest)
TARGET_REPLIES: Final[tuple[type[TargetReply], ...]] = get_args(TargetReply)
DRAFT_REPLIES: Final[tuple[type[DraftReply], ...]] = get_args(DraftReply)
FEATURE_REQUESTS: Final[tuple[type[FeatureRequest], ...]] = get_args(FeatureRequest)
FEATURE_REPLIES: Final[tuple[type[FeatureReply], ...]] = get_args(FeatureReply)
# What each role may send on a daemon's link where keys tell who it is.
ROLES: Final[Mapping[LinkName, Mapping[str, tuple[type[Message], ...]]]] = {
    "target": {"supervisor": (*TARGET_REQUESTS, Leave), "draft": FEATURE_REQUESTS},
    "draft": {"supervisor": (*DRAFT_REQUESTS, Leave)},
}
CLIENT_REQUESTS: Final[tuple[type[ClientRequest], ...]] = get_args(ClientRequest)
CLIENT_REPLIES: Final[tuple[type[ClientReply], ...]] = get_args(ClientReply)


class Phase(Enum):
    """Where one sequence stands on one link."""

    NEW = "new"
    OPENING = "opening"
    OPEN = "open"
    PREFILLING = "prefilling"
    REPLAYING = "replaying"
    VERIFYING = "verifying"
    INGESTING = "ingesting"
    PROPOSING = "proposing"
    CANCELLING = "cancelling"  # Close is sent, and an earlier message's answer is still due
    CLOSING = "closing"
    CLOSED = "closed"


Step = tuple[Phase, type[Message] | type[Item]]
Table = Mapping[Step, Phase]


def _call(
    request: type[Message], busy: Phase, reply: type[Message], *, start: Phase, refused: Phase
) -> dict[Step, Phase]:
    """The rows of one request: sent, answered, refused, and closed before its answer came."""
    return {
        (start, request): busy,
        (busy, reply): Phase.OPEN,
        (busy, ItemFailed): refused,
        (busy, Close): Phase.CANCELLING,
        (Phase.CANCELLING, reply): Phase.CLOSING,
    }


_COMMON: Final[Table] = {
    **_call(Open, Phase.OPENING, Opened, start=Phase.NEW, refused=Phase.CLOSED),
    (Phase.OPEN, Close): Phase.CLOSING,
    (Phase.CANCELLING, ItemFailed): Phase.CLOSING,
    (Phase.CLOSING, Closed): Phase.CLOSED,
    (Phase.CLOSING, ItemFailed): Phase.CLOSED,
}


def _idle_call(request: type[Message], busy: Phase, reply: type[Message]) -> dict[Step, Phase]:
    return _call(request, busy, reply, start=Phase.OPEN, refused=Phase.OPEN)


LEGAL: Final[Mapping[LinkName, Table]] = {
    "target": {
        **_COMMON,
        **_idle_call(Prefill, Phase.PREFILLING, Prefilled),
        **_idle_call(Replay, Phase.REPLAYING, Replayed),
        **_idle_call(Verify, Phase.VERIFYING, Verified),
    },
    "draft": {
        **_COMMON,
        **_idle_call(Ingest, Phase.INGESTING, Ingested),
        **_idle_call(Propose, Phase.PROPOSING, Proposed),
    },
}


def advance(
    link: LinkName, phase: Phase, message: type[Message] | type[Item], *, sequence: int
) -> Phase:
    """The phase after `message`; raises ProtocolError, and changes nothing, when it is illegal.

    `Failed`, the refusal of a whole message, counts as `ItemFailed` for each of its sequences.
    """
    kind = ItemFailed if message is Failed else message
    after = LEGAL[link].get((phase, kind))
    if after is None:
        raise ProtocolError(
            f"sequence {sequence}: {message.__name__} is not legal on the {link} link "
            f"while it is {phase.value}"
        )
    return after


def diagram(link: LinkName) -> str:
    """Draw one link's table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", "    [*] --> new"]
    merged: dict[tuple[Phase, Phase], list[str]] = {}
    for (before, message), after in LEGAL[link].items():
        merged.setdefault((before, after), []).append(message.__name__)
    lines += [
        f"    {before.value} --> {after.value}: {', '.join(names)}"
        for (before, after), names in merged.items()
    ]
    return "\n".join([*lines, "    closed --> [*]"])
