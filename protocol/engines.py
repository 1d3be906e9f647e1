"""What the loop asks of a target and of a draft, in a daemon or in this process.

`target_daemon.engine` and `draft_daemon.engine` hold the real ones. `launch.inprocess` drives any
two objects of these shapes with the session that the supervisor uses, and the daemons put them
behind a socket. Each method takes one sequence's item and returns its result, or raises a
`DaemonError`, after which the sequence is as it was before the call.
"""

from typing import Protocol

from protocol.messages import (
    ClosedItem,
    CloseItem,
    IngestedItem,
    IngestItem,
    OpenedItem,
    OpenItem,
    PrefilledItem,
    PrefillItem,
    ProposedItem,
    ProposeItem,
    ReplayedItem,
    ReplayItem,
    Verdict,
    VerifyItem,
)


class TargetEngine(Protocol):
    """Owns the target's state; the only one that chooses an emitted token."""

    def open(self, item: OpenItem) -> OpenedItem:
        """Reserve a slot, or raise Overloaded."""
        ...

    def prefill(self, item: PrefillItem) -> PrefilledItem:
        """Run one chunk of the prompt; the last one also chooses the first token."""
        ...

    def replay(self, item: ReplayItem) -> ReplayedItem:
        """Run tokens that an earlier life emitted; the last one is pending again."""
        ...

    def verify(self, item: VerifyItem) -> Verdict:
        """Run a block, keep the longest agreeing prefix, commit, and answer."""
        ...

    def close(self, item: CloseItem) -> ClosedItem:
        """Free the slot."""
        ...


class DraftEngine(Protocol):
    """Owns the draft's context; it proposes and never chooses an emitted token."""

    def open(self, item: OpenItem) -> OpenedItem:
        """Take the slot that the target assigned."""
        ...

    def ingest(self, item: IngestItem) -> IngestedItem:
        """Turn new feature rows into context K/V."""
        ...

    def propose(self, item: ProposeItem) -> ProposedItem:
        """Ingest what is new, then run one block."""
        ...

    def close(self, item: CloseItem) -> ClosedItem:
        """Free the slot."""
        ...
