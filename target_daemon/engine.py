"""The target's engine: prefill, verify, commit and close over target, strategy and ring.

Satisfies `protocol.engines.TargetEngine`. It is the only place where emitted tokens are chosen,
and it knows no socket: `target_daemon.daemon` puts it behind one, `launch.inprocess` calls it as
it is. After any error a sequence is as it was before the call.
"""

import logging
from dataclasses import dataclass
from time import perf_counter
from typing import Final, Literal

import msgspec
import torch

from protocol.choice import choose
from protocol.codec import pack_tokens, unpack_tokens
from protocol.errors import InternalError, OutOfMemory
from protocol.kernels.inference import inference
from protocol.messages import (
    ClosedItem,
    CloseItem,
    Finish,
    OpenedItem,
    OpenItem,
    PrefilledItem,
    PrefillItem,
    ReplayedItem,
    ReplayItem,
    TokenLogprobs,
    Verdict,
    VerifyItem,
)
from protocol.transports.base import RingView
from target_daemon.capture import publish
from target_daemon.checks import Limits, check_block, check_chunk, check_replay, check_vocabulary
from target_daemon.failures import undone_on_failure
from target_daemon.kept import KeptState
from target_daemon.logprobs import raw_logprobs
from target_daemon.prefixes import Shelf
from target_daemon.rollback import Undone, WayBack
from target_daemon.sequences import Sequence, Sequences, resolved
from target_daemon.target import DFlashTarget
from target_daemon.verify.base import Block, Judgement, Rules, VerifyStrategy
from target_daemon.verify.chain import STRATEGY as CHAIN
from target_daemon.verify.tree import STRATEGY as TREE
from target_daemon.verify.tree import tree_block

log = logging.getLogger(__name__)

NO_TOKEN: Final = -1


@dataclass(frozen=True, slots=True)
class Decision:
    """What a block came to: the slot holds the rows of `judgement` alone."""

    judgement: Judgement
    logprobs: tuple[TokenLogprobs, ...]
    undone: Undone


class Engine:
    """Runs sequences over one `DFlashTarget`, one call at a time."""

    def __init__(
        self,
        target: DFlashTarget,
        limits: Limits,
        ring: RingView | None = None,
        strategy: VerifyStrategy = CHAIN,
        shelf: Shelf | None = None,
    ) -> None:
        self._target = target
        self._limits = limits
        self._ring = ring
        self._strategy = strategy
        self._sequences = Sequences(target.slots, target.max_positions)
        self.kept = KeptState(target, ring, self._sequences, limits, shelf)
        self._back = WayBack(target, limits.rollback)

    @property
    def rollback(self) -> Literal["fast", "replay"]:
        """The way back in use: what was asked for, if the target can do it."""
        return self._back.kind

    def open(self, item: OpenItem) -> OpenedItem:
        """Reserve a slot, or raise Overloaded or UsageError; its ring rows now belong to it.

        Goes on where a retained sequence has state for the beginning of `item.prefix`.
        """
        target = self._target
        sampling = resolved(item.sampling, target.eos_token_ids, target.vocab_size)
        sequence, start = self.kept.open(item, sampling)
        return OpenedItem(
            sequence=item.sequence,
            round=item.round,
            slot=sequence.slot,
            continues=start,
            committed=sequence.committed,
            oldest=sequence.oldest,
        )

    @inference
    def prefill(self, item: PrefillItem) -> PrefilledItem:
        """Run one chunk; the last one also chooses the first token.

        One that there is no memory for is tried row by row before the request fails. Raises
        PositionMismatch, PromptTooLong, ProtocolError, OutOfMemory or InternalError.
        """
        started = perf_counter()
        sequence = self._sequences.get(item.sequence)
        ids = unpack_tokens(item.tokens)
        chunk, most = self._limits.prefill_chunk, self._target.max_positions
        check_chunk(sequence, item, len(ids), chunk=chunk, most=most)
        check_vocabulary(ids, item.start, self._target.vocab_size)
        self.kept.mark(sequence, item.last and sequence.retains)
        try:
            token, logprobs = self._run_chunk(sequence, item, ids, len(ids))
        except OutOfMemory as error:
            if len(ids) == 1 or sequence.lost:
                raise
            log.warning("a chunk of %d rows failed (%s); trying width 1", len(ids), error)
            token, logprobs = self._run_chunk(sequence, item, ids, 1)
        finish: Finish = "stop" if token in sequence.stops else ""
        stop = item.start + len(ids)
        publish(self._ring, sequence.slot, item.start, stop)
        sequence.committed, sequence.prefilled, sequence.finish = stop, item.last, finish
        return PrefilledItem(
            sequence=item.sequence,
            round=item.round,
            committed=stop,
            token=token,
            finish=finish,
            seconds=perf_counter() - started,
            logprobs=logprobs,
        )

    @inference
    def replay(self, item: ReplayItem) -> ReplayedItem:
        """Run tokens that were emitted in an earlier life, by the forwards of rounds.

        The last one is pending afterwards. Nothing is judged: what a client has is right; the
        tokens that would be chosen otherwise now are counted.
        """
        started = perf_counter()
        sequence = self._sequences.get(item.sequence)
        ids = unpack_tokens(item.tokens)
        check_replay(sequence, item, len(ids), most=self._target.max_positions)
        check_vocabulary(ids, item.base_pos, self._target.vocab_size)
        mismatches = int(ids[0] != sequence.pending)
        sequence.tokens[item.base_pos] = ids[0]
        for start in range(0, len(ids) - 1, self._limits.max_width):
            stop = min(start + self._limits.max_width, len(ids) - 1)
            mismatches += self._run_part(sequence, ids[start : stop + 1])
        sequence.finish = ""
        publish(self._ring, sequence.slot, item.base_pos, sequence.committed)
        return ReplayedItem(
            sequence=item.sequence,
            round=item.round,
            committed=sequence.committed,
            mismatches=mismatches,
            seconds=perf_counter() - started,
        )

    @inference
    def verify(self, item: VerifyItem) -> Verdict:
        """Run a block or tree, keep the longest agreeing path, commit, and answer.

        A repeated round is answered with its stored verdict. A forward that raises is undone and,
        but for a lost GPU and logits that are not finite, tried at width 1; only if that fails too
        does the request fail.
        """
        started = perf_counter()
        sequence, target = self._sequences.get(item.sequence), self._target
        if (verdict := sequence.answered(item)) is not None:
            return verdict
        ids, most = unpack_tokens(item.tokens), target.max_positions
        check_block(sequence, item, ids, widest=self._limits.max_width, most=most)
        check_vocabulary(ids, item.base_pos, target.vocab_size)
        block = Block(item.base_pos, ids, torch.tensor(ids))
        if item.parents:
            block = tree_block(target, block, unpack_tokens(item.parents))
        decision = self._decide(sequence, block, item.budget)
        judgement = decision.judgement
        emitted = judgement.emitted
        publish(self._ring, sequence.slot, item.base_pos, item.base_pos + len(emitted))
        sequence.committed += len(emitted)
        stop = sequence.committed + 1
        sequence.tokens[stop - len(emitted) : stop] = torch.tensor(emitted)
        sequence.finish = judgement.finish
        sequence.verdict = Verdict(
            sequence=item.sequence,
            round=item.round,
            accepted=len(emitted) - 1,
            tokens=pack_tokens(emitted),
            chosen=pack_tokens(judgement.chosen),
            committed=sequence.committed,
            finish=judgement.finish,
            seconds=perf_counter() - started,
            logprobs=decision.logprobs,
            path=pack_tokens([block.rows[row] for row in judgement.path if block.rows]),
            rollback=decision.undone.way,
            replayed=decision.undone.replayed,
        )
        return sequence.verdict

    def close(self, item: CloseItem) -> ClosedItem:
        """Free the slot; with `item.retain` the state of positions below `item.keep` stays."""
        sequence = self._sequences.get(item.sequence)
        retain = item.retain and self.kept.cut(sequence, item.keep)
        self._sequences.close(item.sequence, retain=retain)
        if self._ring is not None:
            self._ring.release(sequence.slot)
        if not retain:
            self._target.reset(sequence.slot)
        return ClosedItem(sequence=item.sequence, round=item.round, committed=sequence.committed)

    def close_all(self) -> None:
        """A new life begins: every slot is free, and sequences are numbered anew."""
        self.kept.forget_numbers()
        for slot in self._sequences.clear():
            if self._ring is not None:
                self._ring.release(slot)
            self._target.reset(slot)

    def _run_chunk(
        self, sequence: Sequence, item: PrefillItem, ids: tuple[int, ...], rows: int
    ) -> tuple[int, tuple[TokenLogprobs, ...]]:
        """Forward the chunk, `rows` at a time; the chosen token and its logprobs.

        Before the last chunk the token is -1.
        """
        stop = item.start + len(ids)
        tokens = torch.tensor(ids)
        with undone_on_failure(self._target, sequence, len(ids)):
            logits = None
            for at in range(0, len(ids), rows):
                part = tokens[at : at + rows]
                is_end = item.last and at + rows >= len(ids)
                wanted: Literal["last", "none"] = "last" if is_end else "none"
                logits = self._target.verify_batch(sequence.slot, part, item.start + at, wanted)
            sequence.tokens[item.start : stop] = tokens
            if logits is None:
                return NO_TOKEN, ()
            sampling = msgspec.structs.replace(sequence.sampling, prompt_tokens=stop)
            sequence.sampling = sampling
            token = int(choose(logits, stop, sampling, sequence.tokens[:stop])[0])
            sequence.tokens[stop] = token
            return token, raw_logprobs(logits, (-1,), (token,), sampling.logprobs)

    def _run_part(self, sequence: Sequence, ids: tuple[int, ...]) -> int:
        """`_run_again`, one row at a time where there is no memory for all of them."""
        try:
            return self._run_again(sequence, ids)
        except OutOfMemory as error:
            if len(ids) == 2 or sequence.lost:
                raise
            log.warning("a replay of %d rows failed (%s); trying width 1", len(ids) - 1, error)
        return sum(self._run_again(sequence, ids[at : at + 2]) for at in range(len(ids) - 1))

    def _run_again(self, sequence: Sequence, ids: tuple[int, ...]) -> int:
        """Commit all of `ids` but the last, which is pending then; how many are not the choice."""
        base, rows = sequence.committed, len(ids) - 1
        block = Block(base, ids[:-1], torch.tensor(ids[:-1]))
        rules = Rules(sequence.sampling, frozenset(), rows, sequence.tokens[: base + 1])
        with undone_on_failure(self._target, sequence, rows) as restore:
            chosen = self._strategy.judge(
                block, self._strategy.forward(self._target, sequence.slot, block), rules
            ).chosen
            kept = Judgement(tuple(range(rows)), ids[1:], chosen, "")
            self._back.keep(self._strategy, sequence.slot, block, kept, restore)
        sequence.tokens[base : base + rows + 1] = torch.tensor(ids)
        sequence.committed += rows
        return sum(one != other for one, other in zip(chosen, ids[1:], strict=True))

    def _decide(self, sequence: Sequence, block: Block, budget: int) -> Decision:
        """Run the block, or failing that its first row: another request may have had the memory."""
        try:
            return self._run_block(sequence, block, budget)
        except (OutOfMemory, InternalError) as error:
            if sequence.lost:
                raise
            log.warning("verify of %d rows failed (%s); trying width 1", len(block.ids), error)
        block = Block(block.base_pos, block.ids[:1], block.tokens[:1])
        return self._run_block(sequence, block, budget)

    def _run_block(self, sequence: Sequence, block: Block, budget: int) -> Decision:
        """Forward, judge and keep; the slot then holds exactly the kept rows."""
        base, target = sequence.committed, self._target
        strategy = TREE if block.parents else self._strategy
        rules = Rules(sequence.sampling, sequence.stops, budget, sequence.tokens[: base + 1])
        with undone_on_failure(self._target, sequence, len(block.ids)) as restore:
            logits = strategy.forward(target, sequence.slot, block)
            judgement = strategy.judge(block, logits, rules)
            wanted = rules.sampling.logprobs
            logprobs = raw_logprobs(logits, judgement.path, judgement.emitted, wanted)
            undone = self._back.keep(strategy, sequence.slot, block, judgement, restore)
            return Decision(judgement, logprobs, undone)
