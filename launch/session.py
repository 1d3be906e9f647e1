"""One request's loop: draft, verify, commit. Pure: events in, commands out.

No socket, clock or thread. The supervisor drives it over daemons, `inprocess` over objects, tests
over lists. At most one request per daemon is outstanding; a reply that is not its answer, by
(life, sequence, round), is dropped and counted. See `_advance` for the order of things.
"""

from typing import Literal, assert_never

from launch.answers import target_defect
from launch.building import Building
from launch.coupling import Coupling
from launch.draft_news import hear
from launch.draft_side import DraftSide
from launch.events import (
    CancelRequested,
    Command,
    DeadlineExpired,
    DraftDown,
    DraftFacts,
    DraftLate,
    DraftUp,
    Event,
    Fail,
    Finish,
    Reply,
    Request,
    Result,
    Start,
    TargetDown,
    TargetFacts,
    TargetUp,
    Withdrawn,
)
from launch.hints import Mode
from launch.journal import Journal
from launch.outstanding import Outstanding
from launch.rounds import Rounds
from launch.shapes import Manner, Shaped
from launch.statistics import Tally
from launch.stream import FindStop
from protocol.errors import DeadlineExceeded, InternalError, ProtocolError, from_wire
from protocol.messages import (
    CloseItem,
    ItemFailed,
    OpenedItem,
    OpenItem,
    PrefilledItem,
    PrefillItem,
    Progress,
    ReplayedItem,
    ReplayItem,
    Submit,
    Verdict,
    VerifyItem,
)

# "waiting" is for another life of the target.
Phase = Literal["new", "opening", "prefilling", "decoding", "waiting", "closing", "done"]


class Session:
    """From Submit to one Finish or Fail; everything emitted is final and in order."""

    def __init__(
        self,
        submit: Submit,
        sequence: int,
        target: TargetFacts,
        draft: DraftFacts | None,
        *,
        no_draft: str = "",
        manner: Manner,
        find_stop: FindStop | None = None,
        coupling: Coupling | None = None,
    ) -> None:
        self.submit = submit
        self.sequence = sequence
        self.journal = Journal(submit.prompt)
        self._tally = Tally()
        self._commands: list[Command] = []
        self._asked = Outstanding(sequence, self._commands)
        self.draft = DraftSide(
            draft,
            no_draft,
            submit=submit,
            target=target,
            asked=self._asked,
            tally=self._tally,
            coupling=coupling,
        )
        self._final_mode: Mode | None = None
        self.phase: Phase = "new"
        self.target = target
        self._down: TargetDown | None = None  # of the target, while another life is to come
        room = max(1, target.max_positions - self.journal.prompt_tokens)
        self._rounds = Rounds(
            submit,
            min(submit.max_tokens, room),  # the context's end is an end by length
            self.journal,
            self.draft,
            self._asked,
            self._tally,
            manner,
            find_stop,
        )
        self._building = Building(submit, self.journal, self._asked, self._tally)
        self._accused_at = (-1, -1)
        self._outcome: Finish | Fail | None = None

    @property
    def tally(self) -> Tally:
        """What has been counted, the last round with it."""
        self.settle()
        return self._tally

    def settle(self) -> None:
        """Count what the last event brought, once nothing waits for what it asked for.

        Called at leisure: what depends on it is counted before it is used, whoever calls.
        """
        self._rounds.settle()

    @property
    def shape(self) -> Shaped:
        """What its rounds verify, and why no trees."""
        return self._rounds.shape.shape()

    @property
    def num_stale_replies(self) -> int:
        return self._asked.num_stale_replies

    @property
    def progress(self) -> tuple[int, int]:
        """How far it has come, in any life: positions of the prompt, and tokens emitted."""
        return self._building.furthest, self.journal.emitted

    @property
    def mode(self) -> Mode:
        """How it runs, or how it ran when it ended, and why."""
        return self._final_mode or self._rounds.mode

    def handle(self, event: Event) -> tuple[Command, ...]:
        """Take in one event; the commands are to be performed in order."""
        match event:
            case Reply():
                self._on_reply(event)
            case Start():
                if self.phase == "new":
                    self.phase = "opening"
                    self._building.open(self.draft.context)
            case DraftUp() | DraftDown() | DraftLate() | Withdrawn():
                if hear(event, self.draft, self._asked, self.journal.emitted):
                    self._rounds.verify(self.target)
            case TargetDown():
                self._lose_target(event)
            case TargetUp(facts):
                self._on_target_up(facts)
            case DeadlineExpired():
                self._on_deadline(event)
            case CancelRequested():
                self._end(Finish("cancelled"))
            case _:
                assert_never(event)
        self._advance()
        commands = tuple(self._commands)
        self._commands.clear()
        return commands

    def _advance(self) -> None:
        """Ask for the next thing when nothing that it depends on is outstanding."""
        asked, draft = self._asked, self.draft
        if self.phase == "closing":
            if not asked and self._outcome is not None:
                self.phase = "done"
                self._commands.append(self._outcome)
            return
        if self.phase not in ("prefilling", "decoding"):
            return
        draft.open(self._building.opened, self.journal.committed)
        if "target" in asked.asked:
            return
        if self.phase == "prefilling":
            self._building.ask(self.target, draft)
        elif "draft" not in asked.asked or not draft.holds_slot:
            self._rounds.ask(self.target)

    # --- replies

    def _on_reply(self, reply: Reply) -> None:
        late = self._asked.late and self._asked.take_late(reply, self.target.life, self.draft.life)
        if late is not None:
            if self.phase != "closing":
                self.draft.take_late(late, reply.item, decoding=self.phase == "decoding")
            return
        asked = self._asked.take(reply, self.target.life, self.draft.life)
        if asked is None or self.phase == "closing" or isinstance(asked, CloseItem):
            return
        if reply.role == "target":
            self._on_target_reply(asked, reply.item)
        elif self.draft.take(asked, reply.item, decoding=self.phase == "decoding"):
            self._rounds.verify(self.target)

    def _on_target_reply(self, asked: Request, item: Result) -> None:
        if defect := target_defect(asked, item, self.target.vocab_size):
            self._distrust_target(defect)
            return
        match asked, item:
            case VerifyItem(), Verdict():
                if (outcome := self._rounds.commit(asked, item)) is not None:
                    self._end(outcome)
            case OpenItem(), ItemFailed():
                self.phase = "new"  # there is nothing to close
                self._end(Fail(from_wire(item.code, item.detail)))
            case _, ItemFailed():
                self._end(Fail(from_wire(item.code, item.detail)))
            case OpenItem(), OpenedItem():
                self._building.on_opened(item)
                self.phase = "prefilling"
            case PrefillItem(), PrefilledItem():
                self._on_prefilled(asked, item)
            case ReplayItem(), ReplayedItem():
                self._on_replayed(item)
            case _:  # pragma: no cover  # `Outstanding.take` pairs requests and answers
                raise InternalError(f"{type(item).__name__} cannot answer {type(asked).__name__}")

    def _on_prefilled(self, asked: PrefillItem, item: PrefilledItem) -> None:
        if self._building.on_prefilled(asked, item):
            self._tally.prefill_seconds += item.seconds
            number, total = self.submit.request, self.journal.prompt_tokens
            self._asked.tell(Progress(request=number, done=item.committed, total=total))
        if self._building.is_done:
            self.phase = "decoding"
            self._end(self._rounds.begin(item))

    def _on_replayed(self, item: ReplayedItem) -> None:
        self._tally.num_replay_mismatches += item.mismatches
        self._building.on_replayed(item)
        if self._building.is_done:
            self.phase = "decoding"

    # --- ends and losses

    def _end(self, outcome: Finish | Fail | None) -> None:
        """Close on both sides; the outcome, if any, goes out when they have answered."""
        if outcome is None or self.phase in ("closing", "done"):
            return
        self._final_mode = self._rounds.mode
        self.draft.end()
        self._tally.num_target_restarts += self._down is not None and self._down.is_fault
        opened, self.phase, self._outcome = self.phase != "new", "closing", outcome
        keep = self.journal.committed if self.journal.emitted else self._building.prefilled
        retain = self.submit.retain and isinstance(outcome, Finish)
        if self._down is None and opened:
            self._asked.ask("target", CloseItem, keep=keep, retain=retain)
        if self.draft.holds_slot:
            is_late = self._asked.late is not None
            self._asked.ask("draft", CloseItem, keep=keep, retain=retain)
            if is_late:  # the client need not wait for it
                self._asked.defer(self._asked.round)

    def _lose_target(self, down: TargetDown) -> None:
        """Wait for its next life, and for a draft that is paired with that."""
        self._down = down
        self._asked.forget("target")
        self.draft.part(down)
        if down.fatal:
            self._end(Fail(down.error))
        elif self.phase in ("opening", "prefilling", "decoding"):
            self.phase = "waiting"
            self._building.start_over()

    def _on_target_up(self, facts: TargetFacts) -> None:
        if self.phase != "waiting":
            return
        self._tally.num_target_restarts += self._down is not None and self._down.is_fault
        self.target, self._down, self.phase = facts, None, "opening"
        self._building.open(self.draft.context)

    def _distrust_target(self, defect: str) -> None:
        """It has lost count of the sequence: another life is tried, and fails only if that does."""
        error = ProtocolError(f"target: {defect}")
        if self._accused_at == self.progress:
            self._end(Fail(error))
            return
        self._accused_at = self.progress
        self._asked.accuse("target", self.target.life, str(error))
        self._lose_target(TargetDown(error))

    def _on_deadline(self, event: DeadlineExpired) -> None:
        asked = self._asked.expire(event)
        if asked is None:
            return
        verb = type(asked).__name__.removesuffix("Item")
        what = f"the {event.role} did not answer {verb} in time"
        if event.role == "target":
            self._lose_target(TargetDown(DeadlineExceeded(what)))
        else:
            self.draft.lose(what)
