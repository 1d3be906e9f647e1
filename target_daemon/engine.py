"""The target's engine: prefill, verify, commit and close over target, strategy and ring.

Satisfies `protocol.engines.TargetEngine`. It is the only place where emitted tokens are chosen,
and it knows no socket: `target_daemon.daemon` puts it behind one, `launch.inprocess` calls it as
it is. After any error a sequence is as it was before the call.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Final, Literal, TypeAlias

import msgspec
import torch

from protocol.choice import choose
from protocol.codec import pack_tokens, unpack_tokens
from protocol.errors import (
    InternalError,
    OutOfMemory,
    PositionMismatch,
    PromptTooLong,
    ProtocolError,
    StaleMessage,
)
from protocol.messages import (
    ClosedItem,
    CloseItem,
    Finish,
    OpenedItem,
    OpenItem,
    PrefilledItem,
    PrefillItem,
    TokenLogprobs,
    Verdict,
    VerifyItem,
)
from protocol.transports.base import RingView
from target_daemon.failures import typed_failures
from target_daemon.logprobs import raw_logprobs
from target_daemon.sequences import Sequence, Sequences, resolved
from target_daemon.target import DFlashTarget
from target_daemon.verify.base import Block, Judgement, Rules, VerifyStrategy
from target_daemon.verify.chain import STRATEGY as CHAIN

log = logging.getLogger(__name__)

NO_TOKEN: Final = -1
Decision: TypeAlias = tuple[Judgement, tuple[TokenLogprobs, ...]]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine refuses beyond; the same numbers stand in TargetHello."""

    prefill_chunk: int
    max_width: int
    rollback: Literal["fast", "replay"] = "fast"


class Engine:
    """Runs sequences over one `DFlashTarget`, one call at a time."""

    def __init__(
        self,
        target: DFlashTarget,
        limits: Limits,
        ring: RingView | None = None,
        strategy: VerifyStrategy = CHAIN,
    ) -> None:
        self._target = target
        self._limits = limits
        self._ring = ring
        self._strategy = strategy
        self._sequences = Sequences(target.slots, target.max_positions)

    @property
    def rollback(self) -> Literal["fast", "replay"]:
        """The way back in use: what was asked for, if the target can do it."""
        return self._limits.rollback if self._target.supports_fast_rollback else "replay"

    def open(self, item: OpenItem) -> OpenedItem:
        """Reserve a slot, or raise Overloaded or UsageError; its ring rows now belong to it."""
        target = self._target
        sampling = resolved(item.sampling, target.eos_token_ids, target.vocab_size)
        sequence = self._sequences.open(item, sampling)
        self._target.reset(sequence.slot)
        if self._ring is not None:
            self._ring.claim(sequence.slot, item.sequence)
        return OpenedItem(sequence=item.sequence, round=item.round, slot=sequence.slot)

    @torch.inference_mode()
    def prefill(self, item: PrefillItem) -> PrefilledItem:
        """Run one chunk; the last one also chooses the first token.

        Raises PositionMismatch, PromptTooLong, ProtocolError, OutOfMemory or InternalError.
        """
        started = perf_counter()
        sequence = self._sequences.get(item.sequence)
        ids = unpack_tokens(item.tokens)
        self._check_chunk(sequence, item, len(ids))
        self._check_vocabulary(ids, item.start)
        token, logprobs = self._run_chunk(sequence, item, ids)
        finish: Finish = "stop" if token in sequence.stops else ""
        stop = item.start + len(ids)
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

    @torch.inference_mode()
    def verify(self, item: VerifyItem) -> Verdict:
        """Run a block, keep the longest agreeing prefix, commit, and answer.

        A repeated round is answered with its stored verdict. A forward that raises is undone and
        tried at width 1; only if that fails too does the request fail.
        """
        started = perf_counter()
        sequence = self._sequences.get(item.sequence)
        if sequence.verdict is not None and item.round <= sequence.verdict.round:
            return _stored(sequence.verdict, item)
        ids = unpack_tokens(item.tokens)
        self._check_block(sequence, item, ids)
        judgement, logprobs = self._decide(sequence, ids, item.budget)
        emitted = judgement.emitted
        start = sequence.committed + 1
        sequence.tokens[start : start + len(emitted)] = torch.tensor(emitted)
        sequence.committed += len(emitted)
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
            logprobs=logprobs,
        )
        return sequence.verdict

    def close(self, item: CloseItem) -> ClosedItem:
        """Free the slot; what it held before `item.keep` or any other position is dropped."""
        sequence = self._sequences.close(item.sequence)
        if self._ring is not None:
            self._ring.release(sequence.slot)
        self._target.reset(sequence.slot)
        return ClosedItem(sequence=item.sequence, round=item.round, committed=sequence.committed)

    # The checks raise before anything is changed.

    def _check_chunk(self, sequence: Sequence, item: PrefillItem, count: int) -> None:
        chunk, most = self._limits.prefill_chunk, self._target.max_positions
        _check_alive(sequence, item.sequence)
        if sequence.prefilled:
            raise ProtocolError(f"the prompt of sequence {item.sequence} has ended already")
        if item.start != sequence.committed:
            raise PositionMismatch(
                f"chunk starts at {item.start}; {sequence.committed} positions are committed"
            )
        if item.start + count > most:
            raise PromptTooLong(
                f"the prompt has at least {item.start + count:,} tokens; this target takes {most:,}"
            )
        # Boundaries are fixed so that a prompt always meets the same products, bit for bit.
        if item.start % chunk or not 1 <= count <= chunk or (count < chunk and not item.last):
            raise ProtocolError(
                f"chunk of {count} tokens at {item.start}; chunks are {chunk} long, the last "
                f"1 to {chunk}"
            )

    def _check_block(self, sequence: Sequence, item: VerifyItem, ids: tuple[int, ...]) -> None:
        most = self._target.max_positions
        _check_alive(sequence, item.sequence)
        if not sequence.prefilled or sequence.finish:
            state = f"has ended ({sequence.finish})" if sequence.finish else "is not prefilled"
            raise ProtocolError(f"sequence {item.sequence} {state}; there is nothing to verify")
        if item.base_pos != sequence.committed:
            raise PositionMismatch(
                f"block is based at {item.base_pos}; {sequence.committed} positions are committed"
            )
        if not 1 <= len(ids) <= self._limits.max_width:
            raise ProtocolError(f"block of {len(ids)} rows; 1 to {self._limits.max_width} allowed")
        if ids[0] != sequence.pending:
            raise ProtocolError(
                f"block starts with token {ids[0]}; {sequence.pending} was chosen for that position"
            )
        if item.base_pos + len(ids) > most:
            raise PromptTooLong(
                f"block of {len(ids)} rows at {item.base_pos} ends at position "
                f"{item.base_pos + len(ids):,}; this target takes {most:,}"
            )
        self._check_vocabulary(ids, item.base_pos)

    def _check_vocabulary(self, ids: tuple[int, ...], start: int) -> None:
        size = self._target.vocab_size
        if min(ids) >= 0 and max(ids) < size:
            return
        index = next(i for i, token in enumerate(ids) if not 0 <= token < size)
        raise ProtocolError(
            f"token id {ids[index]} at position {start + index} is outside the vocabulary of {size}"
        )

    def _run_chunk(
        self, sequence: Sequence, item: PrefillItem, ids: tuple[int, ...]
    ) -> tuple[int, tuple[TokenLogprobs, ...]]:
        """Forward the chunk; the chosen token, or -1 before the last chunk, and its logprobs."""
        stop = item.start + len(ids)
        tokens = torch.tensor(ids)
        with self._undone_on_failure(sequence, len(ids)):
            logits = self._target.verify_batch(
                sequence.slot, tokens, item.start, "last" if item.last else "none"
            )
            sequence.tokens[item.start : stop] = tokens
            if logits is None:
                return NO_TOKEN, ()
            sampling = msgspec.structs.replace(sequence.sampling, prompt_tokens=stop)
            sequence.sampling = sampling
            token = int(choose(logits, stop, sampling, sequence.tokens[:stop])[0])
            sequence.tokens[stop] = token
            return token, raw_logprobs(logits, (-1,), (token,), sampling.logprobs)

    def _decide(self, sequence: Sequence, ids: tuple[int, ...], budget: int) -> Decision:
        """Run the block at full width, or failing that at width 1."""
        try:
            return self._run_block(sequence, ids, budget)
        except (OutOfMemory, InternalError) as error:
            if len(ids) == 1 or sequence.lost:
                raise
            log.warning("verify of %d rows failed (%s); trying width 1", len(ids), error)
        return self._run_block(sequence, ids[:1], budget)

    def _run_block(self, sequence: Sequence, ids: tuple[int, ...], budget: int) -> Decision:
        """Forward, judge and keep; the slot then holds exactly the kept rows."""
        base, target = sequence.committed, self._target
        block = Block(base, ids, torch.tensor(ids))
        rules = Rules(sequence.sampling, sequence.stops, budget, sequence.tokens[: base + 1])
        with self._undone_on_failure(sequence, len(ids)) as restore:
            logits = self._strategy.forward(target, sequence.slot, block)
            judgement = self._strategy.judge(block, logits, rules)
            wanted = sequence.sampling.logprobs
            logprobs = raw_logprobs(logits, judgement.path, judgement.emitted, wanted)
            if not self._keep(sequence, block, judgement):
                restore()
                target.verify_batch(sequence.slot, block.tokens[list(judgement.path)], base, "none")
            return judgement, logprobs

    def _keep(self, sequence: Sequence, block: Block, judgement: Judgement) -> bool:
        """Whether the slot holds the kept rows alone; if not, the block is undone and replayed."""
        if self.rollback == "replay":
            return len(judgement.path) == len(block.ids)
        try:
            return self._strategy.keep(self._target, sequence.slot, block, judgement)
        except (RuntimeError, MemoryError):
            # A failed fast rollback is a reason to replay, never an error.
            log.warning("fast rollback to %d rows failed; replaying", len(judgement.path))
            return False

    @contextmanager
    def _undone_on_failure(self, sequence: Sequence, rows: int) -> Iterator[Callable[[], None]]:
        """Return to the present state if the body raises, and raise typed errors only.

        Yields the function that returns to the present state.
        """
        slot, base, target = sequence.slot, sequence.committed, self._target
        with typed_failures(f"forward of {rows} rows at position {base}"), ExitStack() as undo:
            snapshot = target.snapshot_kv(slot, base, rows)

            def restore() -> None:
                sequence.lost = True  # until the next line has succeeded
                target.restore_kv(slot, snapshot)
                sequence.lost = False

            undo.callback(restore)
            yield restore
            undo.pop_all()


def _check_alive(sequence: Sequence, number: int) -> None:
    if sequence.lost:
        raise InternalError(f"sequence {number} lost its state in an earlier failure; close it")


def _stored(verdict: Verdict, item: VerifyItem) -> Verdict:
    if item.round < verdict.round:
        raise StaleMessage(f"round {item.round} is over; round {verdict.round} was the last")
    return verdict
