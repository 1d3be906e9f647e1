"""One request's loop: draft, verify, commit. Pure: events in, commands out.

No socket, clock or thread. The supervisor drives it over daemons, `inprocess` over objects, tests
over lists. At most one request per daemon is outstanding; a reply that is not its answer, by
(life, sequence, round), is dropped and counted. See `_advance` for the order of things.
"""

from typing import Literal, assert_never

from launch.answers import prefill_defect, verdict_defect
from launch.draft_side import Block, DraftSide
from launch.events import (
    CancelRequested,
    Command,
    DeadlineExpired,
    DraftDown,
    DraftFacts,
    DraftLate,
    DraftUp,
    Emit,
    Event,
    Fail,
    Finish,
    Reply,
    Request,
    Result,
    Start,
    TargetDown,
    TargetFacts,
    Withdrawn,
)
from launch.hints import Guesses
from launch.journal import Journal
from launch.outstanding import Outstanding
from launch.policy import FullWidth, WidthPolicy
from launch.statistics import Tally
from launch.stream import FindStop
from launch.token_ids import WIDTH, one_id, unpack_ids
from protocol.errors import (
    DaemonError,
    DeadlineExceeded,
    InternalError,
    ProtocolError,
    from_wire,
)
from protocol.messages import (
    AllLogprobs,
    CloseItem,
    IngestItem,
    ItemFailed,
    OpenedItem,
    OpenItem,
    Piece,
    PrefilledItem,
    PrefillItem,
    Progress,
    ProposeItem,
    Submit,
    Verdict,
    VerifyItem,
)


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
        policy: WidthPolicy | None = None,
        find_stop: FindStop | None = None,
    ) -> None:
        self.submit = submit
        self.sequence = sequence
        self.journal = Journal(submit.prompt)
        self.tally = Tally()
        self._commands: list[Command] = []
        self._asked = Outstanding(sequence, self._commands)
        self.draft = DraftSide(
            draft,
            no_draft,
            context=submit.draft_context,
            target=target,
            asked=self._asked,
            tally=self.tally,
        )
        self.mode: tuple[Literal["speculative", "autoregressive"], str] = ("autoregressive", "")
        self.phase: Literal["new", "opening", "prefilling", "decoding", "closing", "done"] = "new"
        self.target = target
        self._target_alive = True
        room = max(1, target.max_positions - self.journal.prompt_tokens)
        self._limit = min(submit.max_tokens, room)  # the context's end is an end by length
        self._policy: WidthPolicy = policy or FullWidth()
        self._guesses = Guesses(dict(submit.hints), ngram=submit.ngram)
        self._find_stop = find_stop
        self._slot = -1
        self._prefilled = 0
        self._outcome: Finish | Fail | None = None

    @property
    def num_stale_replies(self) -> int:
        return self._asked.num_stale_replies

    def handle(self, event: Event) -> tuple[Command, ...]:
        """Take in one event; the commands are to be performed in order."""
        match event:
            case Reply():
                self._on_reply(event)
            case Start():
                if self.phase == "new":
                    self.phase = "opening"
                    self._asked.ask("target", OpenItem, sampling=self.submit.sampling)
            case DraftUp(facts):
                self.draft.arrive(facts, self.journal.emitted)
            case DraftDown(reason):
                self.draft.lose(reason)
            case TargetDown(error):
                self._lose_target(error)
            case DeadlineExpired():
                self._on_deadline(event)
            case DraftLate() | Withdrawn():
                self._on_impatience(event)
            case CancelRequested():
                self._end(Finish("cancelled"))
            case _:
                assert_never(event)
        self._advance()
        commands = tuple(self._commands)
        self._commands.clear()
        return commands

    # --- what to do next

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
        if draft.stage == "available" and "draft" not in asked:
            draft.open(self._slot)
        if "target" in asked:
            return
        if self.phase == "prefilling":
            self._prefill_next()
        elif "draft" not in asked or not draft.holds_slot:
            self._next_round()

    def _prefill_next(self) -> None:
        """One chunk, with boundaries at multiples of the chunk size; ingest where rows would go."""
        chunk, total = self.target.prefill_chunk, self.journal.prompt_tokens
        start = self._prefilled
        stop = min(total, (start // chunk + 1) * chunk)
        if self.draft.would_lose_rows(start, stop - start, total):
            if "draft" not in self._asked:
                self._asked.ask("draft", IngestItem, stop=start)
            return
        tokens = self.journal.prompt[start * WIDTH : stop * WIDTH]
        self._asked.ask("target", PrefillItem, start=start, tokens=tokens, last=stop == total)

    def _next_round(self) -> None:
        """Propose where a draft is open and more than one token is wanted; else verify alone."""
        base, budget = self.journal.committed, self._limit - self.journal.emitted
        block_size = min(self.draft.block_size, self.target.max_width)
        width = self._policy.width(block_size=block_size, budget=budget)
        # More rows than a prefill chunk are an ingest of their own, with its own deadline.
        late = width > 1 and self.draft.behind(base) > self.target.prefill_chunk
        if late or self.draft.would_lose_rows(base, width, base):
            self._asked.ask("draft", IngestItem, stop=base)
            return
        if width > 1:
            pending = self.journal.pending
            self._asked.ask("draft", ProposeItem, base_pos=base, pending=pending, width=width)
        else:
            self._asked.round += 1
            self._verify()

    def _verify(self) -> None:
        """Send the block of this round: the pending token, then proposals and guesses."""
        journal, block, base = self.journal, self.draft.block, self.journal.committed
        budget = self._limit - journal.emitted
        self._guesses.complete(block, journal, min(budget, self.target.max_width) - 1)
        tokens = one_id(journal.pending) + block.proposed
        self._asked.ask_again("target", VerifyItem, base_pos=base, tokens=tokens, budget=budget)

    # --- replies

    def _on_reply(self, reply: Reply) -> None:
        late = self._asked.take_late(reply, self.target.life, self.draft.life)
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
            self._verify()

    def _on_impatience(self, event: DraftLate | Withdrawn) -> None:
        """Go on without the draft's answer, which may still come, or never will."""
        if isinstance(event, DraftLate):
            self._asked.defer(event.round)
            return
        asked = self._asked.withdraw(event.round)
        if isinstance(asked, IngestItem):
            self.draft.give_up(asked.stop)
        elif isinstance(asked, ProposeItem):
            self._verify()

    def _on_target_reply(self, asked: Request, item: Result) -> None:
        match asked, item:
            case OpenItem(), ItemFailed():
                self.phase = "new"  # there is nothing to close
                self._end(Fail(from_wire(item.code, item.detail)))
            case _, ItemFailed():
                self._end(Fail(from_wire(item.code, item.detail)))
            case OpenItem(), OpenedItem():
                self._slot = item.slot
                self.phase = "prefilling"
            case PrefillItem(), PrefilledItem():
                self._on_prefilled(asked, item)
            case VerifyItem(), Verdict():
                self._on_verdict(asked, item)
            case _:  # pragma: no cover  # `Outstanding.take` pairs requests and answers
                raise InternalError(f"{type(item).__name__} cannot answer {type(asked).__name__}")

    def _on_prefilled(self, asked: PrefillItem, item: PrefilledItem) -> None:
        if defect := prefill_defect(asked, item, self.target.vocab_size):
            self._end(Fail(ProtocolError(f"target: {defect}")))
            return
        self._prefilled = item.committed
        self.tally.prefill_seconds += item.seconds
        number, total = self.submit.request, self.journal.prompt_tokens
        self._commands.append(Emit(Progress(request=number, done=item.committed, total=total)))
        if asked.last:
            self.phase = "decoding"
            self._emit(one_id(item.token), 0, b"", 0.0, item.logprobs)
            self._end_if(item.finish)

    def _on_verdict(self, asked: VerifyItem, item: Verdict) -> None:
        if defect := verdict_defect(asked, item, self.target.vocab_size):
            self._end(Fail(ProtocolError(f"target: {defect}")))
            return
        width, block = len(asked.tokens) // WIDTH, self.draft.block
        self.tally.add_round(width - 1, item.accepted, block.hinted, block.looked_up)
        self.tally.add_seconds(block.draft_seconds, block.ingest_seconds, item.seconds)
        self._emit(item.tokens, width, item.chosen, item.seconds, item.logprobs)
        self._end_if(item.finish)

    def _emit(
        self, tokens: bytes, width: int, chosen: bytes, seconds: float, logprobs: AllLogprobs
    ) -> None:
        """Journal and command in one place: no token goes out unrecorded, or behind a stop."""
        block, self.draft.block = self.draft.block, Block()
        kept = self._find_stop(unpack_ids(tokens)) if self._find_stop else None
        tokens = tokens if kept is None else tokens[: kept * WIDTH]
        piece = Piece(
            request=self.submit.request,
            position=self.journal.end,
            tokens=tokens,
            width=width,
            proposed=block.proposed,
            chosen=chosen,
            draft_seconds=block.draft_seconds,
            ingest_seconds=block.ingest_seconds,
            verify_seconds=seconds,
            logprobs=logprobs[:kept],
        )
        self.journal.emit(tokens)
        self._commands.append(Emit(piece))
        if kept is not None:
            self._end(Finish("stop"))

    # --- ends and losses

    def _end_if(self, finish: Literal["", "stop", "length"]) -> None:
        if finish:
            self._end(Finish(finish))
        elif self.journal.emitted >= self._limit:
            self._end(Finish("length"))

    def _end(self, outcome: Finish | Fail) -> None:
        """Close on both sides; the outcome goes out when they have answered."""
        if self.phase in ("closing", "done"):
            return
        opened, self.phase, self._outcome = self.phase != "new", "closing", outcome
        self.mode = self._guesses.mode(self.draft.mode())
        keep = self.journal.committed if self.journal.emitted else self._prefilled
        if self._target_alive and opened:
            self._asked.ask("target", CloseItem, keep=keep)
        if self.draft.holds_slot:
            is_late = self._asked.is_late
            self._asked.ask("draft", CloseItem, keep=keep)
            if is_late:  # the client need not wait for it
                self._asked.defer(self._asked.round)

    def _lose_target(self, error: DaemonError) -> None:
        self._target_alive = False
        self._asked.forget("target")
        self._end(Fail(error))

    def _on_deadline(self, event: DeadlineExpired) -> None:
        asked = self._asked.expire(event)
        if asked is None:
            return
        verb = type(asked).__name__.removesuffix("Item")
        what = f"the {event.role} did not answer {verb} in time"
        if event.role == "target":
            self._lose_target(DeadlineExceeded(what))
        else:
            self.draft.lose(what)
