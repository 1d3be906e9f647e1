"""The target's book of open sequences: what each has committed, and which slot holds it."""

from collections import deque
from dataclasses import dataclass
from typing import Final

import msgspec
import torch
from torch import Tensor

from protocol.errors import Overloaded, ProtocolError, StaleMessage, UnknownSequence, UsageError
from protocol.messages import Finish, OpenItem, Sampling, Verdict, VerifyItem

REMEMBERED_CLOSED: Final = 4096


@dataclass(slots=True)
class Sequence:
    """One request. Invariant after prefill: ``tokens[committed]`` is pending and has no state."""

    slot: int
    sampling: Sampling
    stops: frozenset[int]  # EOS, where it is not ignored, and the stop tokens
    tokens: Tensor  # [max_positions + 1] int64, filled up to and with the pending token
    committed: int = 0
    oldest: int = 0  # the lowest position whose feature row was written in this slot
    prefilled: bool = False
    retains: bool = False  # another may go on from its state
    lost: bool = False  # its state could not be restored after a failure
    finish: Finish = ""
    verdict: Verdict | None = None  # of the last round, for a repeated question
    before: tuple[int, object] | None = None  # base and snapshot of the last forward

    @property
    def pending(self) -> int:
        """The emitted token that has not run yet; only after prefill."""
        return int(self.tokens[self.committed])

    def answered(self, item: VerifyItem) -> Verdict | None:
        """The stored verdict, if this round was judged already; StaleMessage for an earlier one."""
        verdict = self.verdict
        if verdict is None or item.round > verdict.round:
            return None
        if item.round < verdict.round:
            raise StaleMessage(f"round {item.round} is over; round {verdict.round} was the last")
        return verdict


def resolved(sampling: Sampling, eos: tuple[int, ...], vocab_size: int) -> Sampling:
    """`sampling` with the target's own EOS ids; UsageError for ids that the target does not have.

    A tokenizer's EOS that the target cannot produce ends nothing, and is left out.
    """
    for token in (*(token for token, _ in sampling.logit_bias), *sampling.stop_token_ids):
        if token >= vocab_size:
            raise UsageError(f"token id {token}; this target's are 0 to {vocab_size - 1}")
    ends = {token for token in sampling.eos_token_ids if token < vocab_size} | set(eos)
    return msgspec.structs.replace(sampling, eos_token_ids=tuple(sorted(ends)))


@dataclass(frozen=True, slots=True)
class Retained:
    """What a closed sequence left in its slot, until another one takes it."""

    number: int
    committed: int
    oldest: int


class Sequences:
    """Hands out `slots` slots; a sequence that was closed is never opened again."""

    def __init__(self, slots: int, max_positions: int) -> None:
        self._free = deque(range(slots))
        self._tokens = torch.zeros((slots, max_positions + 1), dtype=torch.int64)
        self._open: dict[int, Sequence] = {}
        self._closed: deque[int] = deque(maxlen=REMEMBERED_CLOSED)
        self.retained: dict[int, Retained] = {}  # by slot, oldest first

    def tokens(self, slot: int) -> Tensor:
        """Ids of the slot's text [max_positions + 1], as far as it has been run."""
        return self._tokens[slot]

    def check(self, number: int) -> None:
        """Raise Overloaded, StaleMessage (it was closed) or ProtocolError (it is open)."""
        if number in self._open:
            raise ProtocolError(f"sequence {number} is open already")
        if number in self._closed:
            raise StaleMessage(f"sequence {number} was closed; it never computes again")
        if not self._free:
            raise Overloaded(f"all {len(self._open)} slots of the target are taken")

    def open(self, item: OpenItem, sampling: Sampling, slot: int) -> Sequence:
        """Take a free slot for the `resolved` sampling; what it held is the caller's to use.

        Raises as `check`.
        """
        self.check(item.sequence)
        self._free.remove(slot)
        ends = frozenset(() if sampling.ignore_eos else sampling.eos_token_ids)
        stops = frozenset(sampling.stop_token_ids) | ends
        sequence = Sequence(slot, sampling, stops, self._tokens[slot], retains=item.retain)
        self._open[item.sequence] = sequence
        self.retained.pop(slot, None)
        return sequence

    def emptiest(self) -> int:
        """A free slot that holds nothing, or the one whose state was retained first."""
        for slot in self._free:
            if slot not in self.retained:
                return slot
        return next(iter(self.retained))

    def get(self, number: int) -> Sequence:
        """The open sequence `number`, or UnknownSequence."""
        try:
            return self._open[number]
        except KeyError:
            raise UnknownSequence(f"sequence {number} is not open") from None

    def close(self, number: int, *, retain: bool = False) -> Sequence:
        """Free the slot and remember that `number` ended, and with `retain` what it holds."""
        sequence = self.get(number)
        del self._open[number]
        self._closed.append(number)
        self._free.append(sequence.slot)
        if retain:
            self.retained[sequence.slot] = Retained(number, sequence.committed, sequence.oldest)
        return sequence

    def clear(self) -> tuple[int, ...]:
        """Free all slots that are taken, return them, and forget what ended."""
        slots = tuple(sequence.slot for sequence in self._open.values())
        self._open.clear()
        self._closed.clear()
        self._free.extend(slots)
        return slots
