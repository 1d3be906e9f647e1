"""The rounds of one request: propose, verify, and what a commit emits. Pure."""

from dataclasses import dataclass

from launch.block import Block
from launch.draft_side import DraftSide
from launch.events import Finish, TargetFacts
from launch.hints import Guesses, Mode, with_guesses
from launch.journal import Journal
from launch.outstanding import Outstanding
from launch.policy import ALONE, Choice, Outcome, Situation
from launch.shapes import Manner, Room
from launch.statistics import Tally, TreeRound
from launch.stream import FindStop
from launch.token_ids import WIDTH, one_id, unpack_ids
from protocol.messages import (
    IngestItem,
    Piece,
    PrefilledItem,
    Submit,
    Verdict,
    VerifyItem,
)
from protocol.trees import depths


@dataclass(slots=True)
class Past:
    """A round that was emitted; `kept`: how many tokens a stop string left."""

    asked: VerifyItem
    item: Verdict
    block: Block
    kept: int | None


class Rounds:
    """Asks for the next step when nothing is outstanding, and emits what a step has committed."""

    def __init__(
        self,
        submit: Submit,
        limit: int,
        journal: Journal,
        draft: DraftSide,
        asked: Outstanding,
        tally: Tally,
        manner: Manner,
        find_stop: FindStop | None,
    ) -> None:
        self._request = submit.request
        self._limit = limit  # tokens that may be emitted
        self._journal = journal
        self._draft = draft
        self._asked = asked
        self._tally = tally
        self._policy = manner.policy
        self.shape = manner.shape
        self._find_stop = find_stop
        self._choice = ALONE
        self._past: Past | None = None  # the last round, until it is counted
        hints = {position: token for position, token in submit.hints if position < limit}
        self._guesses = Guesses(hints, submit.ngram, manner.lookups)

    @property
    def mode(self) -> Mode:
        """How the request goes on from here, and why: the draft's part, the policy's, guesses."""
        mode, reason = self._draft.mode()
        if mode == "speculative" and (unused := self._policy.reason()):
            mode, reason = "autoregressive", f"{reason}; {unused}" if reason else unused
        tally = self._tally
        guessed = tally.num_hint_tokens + tally.num_ngram_tokens
        return with_guesses((mode, reason), guessed, tally.num_draft_tokens)

    def ask(self, target: TargetFacts) -> None:
        """Propose where a draft is open and more than one token is wanted; else verify alone."""
        base, budget = self._journal.committed, self._limit - self._journal.emitted
        block_size = min(self._draft.block_size(base), target.max_width)
        now = Situation(block_size, budget, base)
        choice = self._policy.choose(now)
        most = min(budget, target.max_width)
        if (rows := self._guesses.rows(self._policy, now, self._journal, most)) > 1:
            choice = Choice(1, rows)
        top_k = self.shape.top_k(target, self._draft.facts) if choice.verify > 1 else 0
        if not top_k and self._guesses.cover(self._journal, choice.propose - 1):
            choice = Choice(1, choice.verify)  # nothing of the draft's would be verified
        self._choice = choice
        if self._must_ingest(target, base, block_size):
            self._asked.ask("draft", IngestItem, stop=base)
        elif choice.propose > 1:
            self._draft.propose(base, self._journal.pending, choice.propose, top_k)
        else:
            self._asked.round += 1
            self.verify(target)

    def _must_ingest(self, target: TargetFacts, base: int, block_size: int) -> bool:
        """Whether the draft's context comes first: for its own deadline, or not to be lost."""
        behind, choice = self._draft.behind(base), self._choice
        if choice.propose > 1:  # rows of more than a prefill chunk are an ingest of their own
            late = behind > target.prefill_chunk
        else:  # half the ring's window, so that a wide round never finds it far behind
            late = block_size > 1 and behind * 2 >= target.ring_capacity - target.prefill_chunk
        rows = self.shape.rows(choice.verify) if choice.verify > 1 else 1
        return late or self._draft.would_lose_rows(base, min(rows, target.max_width), base)

    def verify(self, target: TargetFacts) -> None:
        """Send the block of this round: the pending token, then proposals and guesses."""
        self.settle()
        journal, block, base = self._journal, self._draft.block, self._journal.committed
        budget = self._limit - journal.emitted
        rows = self._policy.cut(self._choice, block.confidences)
        block.proposed = block.offered[: (rows - 1) * WIDTH]
        self._guesses.complete(block, journal, min(budget, target.max_width) - 1)
        block.chain = len(block.proposed) // WIDTH
        self.shape.complete(block, Room(base, budget - 1, target.max_width))
        fields = {"tokens": one_id(journal.pending) + block.proposed, "parents": block.parents}
        self._asked.ask_again("target", VerifyItem, base_pos=base, budget=budget, **fields)

    def begin(self, item: PrefilledItem) -> Finish | None:
        """The prompt's end chose the first token."""
        first = Verdict(
            sequence=item.sequence,
            accepted=0,
            tokens=one_id(item.token),
            chosen=b"",
            committed=item.committed,
            finish=item.finish,
            seconds=0.0,
            logprobs=item.logprobs,
        )
        return self._emit(first, 0, self._kept(first))

    def commit(self, asked: VerifyItem, item: Verdict) -> Finish | None:
        """Emit a round; the request's end, if this is it. `settle` counts it."""
        width, block, kept = len(asked.tokens) // WIDTH, self._draft.block, self._kept(item)
        self._past = Past(asked, item, block, kept)
        self._draft.judge(item.tokens)
        if self._policy.learns or self._guesses.learns:
            self.settle()
        return self._emit(item, width, kept)

    def settle(self) -> None:
        """Count the last round and learn from it, as late as it is noticed by nobody."""
        if self._past is None:
            return
        past, self._past = self._past, None
        item, block, tokens = past.item, past.block, unpack_ids(past.item.tokens)
        accepted = item.accepted if past.kept is None else past.kept - 1
        guessed, tree = (block.hinted, block.looked_up), _tree_round(item, block)
        self._tally.add_round(len(past.asked.tokens) // WIDTH - 1, accepted, *guessed, tree)
        self._tally.add_rollback(item.rollback, item.replayed)
        self._tally.add_seconds(block.draft_seconds, block.ingest_seconds, item.seconds)
        self._tally.moved_bytes += block.moved_bytes
        self._policy.note(_outcome(past.asked, item, block))
        self.shape.note(tokens)
        self._guesses.judge(tokens)

    def _kept(self, item: Verdict) -> int | None:
        """How many tokens a stop string leaves, if one ends the text among them."""
        return self._find_stop(unpack_ids(item.tokens)) if self._find_stop else None

    def _emit(self, item: Verdict, width: int, kept: int | None) -> Finish | None:
        """Journal and command in one place: no token goes out unrecorded, or behind a stop."""
        block, self._draft.block = self._draft.block, Block()
        tokens = item.tokens if kept is None else item.tokens[: kept * WIDTH]
        piece = Piece(
            request=self._request,
            position=self._journal.end,
            tokens=tokens,
            width=width,
            proposed=block.proposed,
            parents=block.parents,
            path=item.path,
            chosen=item.chosen,
            draft_seconds=block.draft_seconds,
            ingest_seconds=block.ingest_seconds,
            moved_bytes=block.moved_bytes,
            verify_seconds=item.seconds,
            logprobs=item.logprobs[:kept],
        )
        self._journal.emit(tokens)
        self._asked.tell(piece)
        if kept is not None:
            return Finish("stop")
        if item.finish:
            return Finish(item.finish)
        return Finish("length") if self._journal.emitted >= self._limit else None


def _outcome(asked: VerifyItem, item: Verdict, block: Block) -> Outcome:
    """A round as the policy sees it; a proposal that a hint replaced, and those after, are not."""
    own = block.chain - len(block.looked_up)
    return Outcome(
        position=asked.base_pos,
        rows=len(asked.tokens) // WIDTH,
        offered=unpack_ids(block.offered),
        drafted=min(own, len(block.offered) // WIDTH, *block.hinted),
        # As the chain alone would have it: of a tree's path, what is beside it says nothing.
        tokens=unpack_ids(item.tokens)[: _on_chain(item, block) + 1],
        draft_seconds=block.draft_seconds,
        ingest_seconds=block.ingest_seconds,
        ingested=block.ingested,
        verify_seconds=item.seconds,
        confidences=block.confidences,
    )


def _on_chain(item: Verdict, block: Block) -> int:
    """How many of the chain's drafts were accepted; a tree's path may have left it."""
    if not block.parents:
        return item.accepted
    path = unpack_ids(item.path)
    return sum(row == at for at, row in enumerate(path[: block.chain + 1])) - 1


def _tree_round(item: Verdict, block: Block) -> TreeRound | None:
    if not block.parents:
        return None
    return TreeRound(max(depths(unpack_ids(block.parents))), _on_chain(item, block))
