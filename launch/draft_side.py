"""One session's dealings with its draft: whether it can be asked, and what it has answered."""

from typing import Final, Literal

from launch.answers import ingest_defect, proposal_defect
from launch.block import Block
from launch.coupling import Coupling, temperatures
from launch.events import (
    DraftDown,
    DraftFacts,
    Request,
    Result,
    TargetDown,
    TargetFacts,
)
from launch.joining import Gone, joined_again
from launch.outstanding import Outstanding
from launch.statistics import Tally
from launch.token_ids import unpack_ids
from protocol.errors import (
    DeadlineExceeded,
    FeatureExpired,
    InternalError,
    OutOfMemory,
    Unavailable,
    UnsupportedModel,
)
from protocol.messages import (
    MAX_ALTERNATIVES,
    CloseItem,
    IngestedItem,
    IngestItem,
    ItemFailed,
    OpenedItem,
    OpenItem,
    ProposedItem,
    ProposeItem,
    Submit,
)

# Of a draft that cannot reach its target, or came too late there: it need not be started again.
MOST_STARVED: Final = 8  # answers in a row for which it had no memory
NOT_ITS_FAULT: Final = {DeadlineExceeded.code, FeatureExpired.code, Unavailable.code}


class DraftSide:
    """Pure. ``absent`` and ``available`` hold nothing in the draft daemon; the others a slot.

    Whatever goes wrong here ends in ``absent`` with a reason, and the request goes on without.
    """

    def __init__(
        self,
        facts: DraftFacts | None,
        reason: str,
        *,
        submit: Submit,
        target: TargetFacts,
        asked: Outstanding,
        tally: Tally,
        coupling: Coupling | None,
    ) -> None:
        self.facts = facts
        self.life = facts.life if facts is not None else 0
        self.stage: Literal["absent", "available", "opening", "open"] = "absent"
        self.reason = reason
        self.block = Block()
        self._is_owed = False  # a life that it lost is being made good
        self._starved = 0
        self._gone: Gone = ("draft", "lost")
        self._ingested = 0  # rows below this position are context, or were given up
        self._wanted = submit.draft_context
        self._sampling = submit.sampling
        self._coupling = coupling
        self._parts: tuple[int, ...] = ()  # of the temperature, at each slot that was asked for
        self._target = target
        self._asked = asked
        self._tally = tally
        if facts is not None:
            self.stage, self.reason = "available", facts.doubt

    @property
    def holds_slot(self) -> bool:
        return self.stage in ("opening", "open")

    @property
    def context(self) -> int:
        """Rows of context that can matter: the request's own number, within the draft's."""
        if self.facts is None:
            return 0
        window = self.facts.context_window
        return min(self._wanted, window) if self._wanted else window

    def block_size(self, base: int) -> int:
        """The widest block it can propose now at `base`; 1 is none."""
        facts = self.facts
        if facts is None or self.stage != "open" or self._asked.late is not None:
            return 1
        return max(1, min(facts.block_size, facts.positions - base))

    def mode(self) -> tuple[Literal["speculative", "autoregressive"], str]:
        """How the request goes on from here, and why."""
        return ("autoregressive" if self.stage == "absent" else "speculative", self.reason)

    def behind(self, end: int) -> int:
        """Rows below `end` that an ingest would still have to take in."""
        return end - max(self._ingested, end - self.context)

    def would_lose_rows(self, first: int, rows: int, end: int) -> bool:
        """Whether a forward of `rows` at `first` overwrites rows that proposing at `end` needs.

        Rows older than the draft's context at `end` are not needed: a long prompt costs no
        ingest while the ring alone still holds what the first block attends to.
        """
        overwritten = first + rows - self._target.ring_capacity  # positions below this one
        needed = max(self._ingested, end - self.context)
        if needed >= min(overwritten, first):
            return False
        return self.holds_slot and self._asked.late is None

    def open(self, opened: OpenedItem | None, base: int) -> None:
        """If it can be asked, ask for the slot that the target assigned, with what lies there.

        At a `base` above which no block fits below the last position that it takes, it is left.
        """
        if self.facts is not None and base + 2 > self.facts.positions:
            self._leave_at(base, self.facts.positions)
        if self.stage != "available" or "draft" in self._asked.asked or opened is None:
            return
        self.stage = "opening"
        self._asked.ask(
            "draft",
            OpenItem,
            slot=opened.slot,
            sampling=self._sampling,
            draft_context=self._wanted,
            continues=opened.continues,
            committed=opened.committed,
            oldest=opened.oldest,
        )

    def propose(self, base: int, pending: int, width: int, top_k: int) -> None:
        """Ask for a block, each slot at the temperature that is accepted most.

        With `top_k`, for so many ids at each slot.
        """
        self._parts = () if self._coupling is None else self._coupling.parts(width - 1)
        self._asked.ask(
            "draft",
            ProposeItem,
            base_pos=base,
            pending=pending,
            width=width,
            temperatures=temperatures(self._parts, self._sampling.temperature),
            top_k=min(top_k, MAX_ALTERNATIVES // (width - 1)),
        )

    def judge(self, tokens: bytes) -> None:
        """The round has emitted `tokens`: the target's choices at the slots that were reached."""
        if self._coupling is not None and self.block.offered:
            offered = unpack_ids(self.block.offered)
            self._coupling.note(self._parts, offered, unpack_ids(tokens))

    def arrive(self, facts: DraftFacts, emitted: int) -> None:
        """A draft that knows nothing of this sequence yet: a new life, or one paired anew."""
        if facts.life < self.life or (facts.life == self.life and self.stage != "absent"):
            return
        self._asked.forget("draft")
        self._tally.num_draft_restarts += facts.life > self.life > 0 and self._gone[1] == "lost"
        self._is_owed = False
        joined = joined_again(self._gone) if self.life else "draft joined"
        self.facts, self.life, self.stage, self._ingested = facts, facts.life, "available", 0
        joined = f"{joined} after {emitted} tokens" if emitted else ""
        self.reason = "; ".join(part for part in (joined, facts.doubt) if part)

    def part(self, down: TargetDown) -> None:
        """The target that it is paired with is gone, and the round in progress."""
        self._gone = ("target", down.cause)
        again = "" if down.cause == "parked" else "the target is started again: "
        self.lose(f"{again}{down.error}")
        self.block = Block()

    def end(self) -> None:
        """The request ends: a restart that is under way counts as one."""
        self._tally.num_draft_restarts += self._is_owed
        self._is_owed = False

    def die(self, down: DraftDown) -> None:
        """Its life is over; if it was lost, the next one is being started."""
        self._gone = ("draft", down.cause)
        self._is_owed = self._is_owed or (self.life > 0 and down.cause == "lost")
        self.lose(down.reason)

    def lose(self, reason: str) -> None:
        """It cannot be asked any more; the first reason of a life stays."""
        self._asked.forget("draft")
        if self.stage == "absent" and self.life:
            return
        self.facts, self.stage, self.reason = None, "absent", reason

    def take(self, asked: Request, item: Result, *, decoding: bool) -> bool:
        """Take in the answer to `asked`; True when a block is ready to be verified."""
        match asked, item:
            case ProposeItem() | IngestItem(), ItemFailed(code=OutOfMemory.code):
                return self._on_starved(asked)
            case _, ItemFailed():
                holds_slot = not isinstance(asked, OpenItem)
                reason, sick = f"the draft refused: {item.detail}", item.code not in NOT_ITS_FAULT
                if item.code == UnsupportedModel.code:  # as any other life of it would
                    self._leave(reason, holds_slot)
                else:
                    self._distrust(reason, holds_slot, sick=sick)
            case OpenItem(), OpenedItem():
                self.stage, self._ingested = "open", min(item.committed, asked.committed)
            case IngestItem(), IngestedItem():
                self._on_ingested(asked, item, decoding)
            case ProposeItem(), ProposedItem():
                return self._on_proposed(asked, item)
            case _:  # pragma: no cover  # `Outstanding.take` pairs requests and answers
                raise InternalError(f"{type(item).__name__} cannot answer {type(asked).__name__}")
        return False

    def take_late(self, asked: Request, item: Result, *, decoding: bool) -> None:
        """Take in an answer that the session has gone on without: proposals are too late."""
        if isinstance(asked, ProposeItem) and isinstance(item, ProposedItem):
            self._tally.num_late_proposals += 1
            if defect := proposal_defect(asked, item, self._target.vocab_size):
                self._distrust(f"the draft answered nonsense: {defect}")
                return
            self._ingested = asked.base_pos
            self._tally.add_seconds(item.draft_seconds, item.ingest_seconds, 0.0)
            self._tally.moved_bytes += item.moved_bytes
        elif not isinstance(asked, CloseItem):
            self.take(asked, item, decoding=decoding)

    def give_up(self, stop: int) -> None:
        """Rows below `stop` could not be taken in before they are overwritten: a gap is legal."""
        self._ingested = max(self._ingested, stop)

    def _on_ingested(self, asked: IngestItem, item: IngestedItem, decoding: bool) -> None:
        if defect := ingest_defect(asked, item):
            self._distrust(f"the draft answered nonsense: {defect}")
            return
        rows, self._ingested = self.behind(item.stop), item.stop
        if decoding:
            self.block.ingested += rows
            self.block.ingest_seconds += item.seconds
            self.block.moved_bytes += item.moved_bytes
        else:
            self._tally.prompt_ingest_seconds += item.seconds
            self._tally.prompt_moved_bytes += item.moved_bytes

    def _on_proposed(self, asked: ProposeItem, item: ProposedItem) -> bool:
        if defect := proposal_defect(asked, item, self._target.vocab_size):
            self._distrust(f"the draft answered nonsense: {defect}")
            return False
        self.block.ingested += self.behind(asked.base_pos)
        self._ingested = asked.base_pos
        self._starved, self.block.offered = 0, item.tokens
        self.block.top_ids, self.block.top_logprobs = item.top_ids, item.top_logprobs
        self.block.confidences = item.confidences
        self.block.draft_seconds += item.draft_seconds
        self.block.ingest_seconds += item.ingest_seconds
        self.block.moved_bytes += item.moved_bytes
        return True

    def _on_starved(self, asked: ProposeItem | IngestItem) -> bool:
        """It had no memory for this: the round goes on at width 1, and the next one asks again.

        True where nothing that it proposed is to be verified now.
        """
        self._starved += 1
        what = "a block" if isinstance(asked, ProposeItem) else "feature rows"
        self.reason = f"the draft had no memory for {what}"
        if self._starved >= MOST_STARVED:
            self._leave(self.reason, holds_slot=True)
            return False
        if isinstance(asked, IngestItem):
            self.give_up(asked.stop)
        return isinstance(asked, ProposeItem)

    def _leave_at(self, base: int, positions: int) -> None:
        if "draft" in self._asked.asked or self._asked.late is not None:
            return
        most = f"the draft takes {positions:,} positions"
        self._leave(f"the text has come to position {base:,}, and {most}", self.holds_slot)

    def _leave(self, reason: str, holds_slot: bool) -> None:
        """Go on without the draft, which may serve others; its slot there is freed."""
        self.lose(reason)
        if holds_slot:
            self._asked.ask("draft", CloseItem)

    def _distrust(self, reason: str, holds_slot: bool = True, *, sick: bool = True) -> None:
        """Go on without this life of the draft, which should end; its slot there is freed."""
        self._leave(reason, holds_slot)
        self._asked.accuse("draft", self.life, reason, sick=sick)
