"""The target's book of open sequences: what each has committed, and which slot holds it."""

from collections import deque
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from protocol.errors import Overloaded, ProtocolError, StaleMessage, UnknownSequence
from protocol.messages import Finish, OpenItem, Sampling, Verdict

REMEMBERED_CLOSED: Final = 4096


@dataclass(slots=True)
class Sequence:
    """One request. Invariant after prefill: ``tokens[committed]`` is pending and has no state."""

    slot: int
    sampling: Sampling
    stops: frozenset[int]
    tokens: Tensor  # [max_positions + 1] int64, filled up to and with the pending token
    committed: int = 0
    prefilled: bool = False
    lost: bool = False  # its state could not be restored after a failure
    finish: Finish = ""
    verdict: Verdict | None = None  # of the last round, for a repeated question

    @property
    def pending(self) -> int:
        """The emitted token that has not run yet; only after prefill."""
        return int(self.tokens[self.committed])


class Sequences:
    """Hands out `slots` slots; a sequence that was closed is never opened again."""

    def __init__(self, slots: int, max_positions: int) -> None:
        self._free = deque(range(slots))
        self._tokens = torch.zeros((slots, max_positions + 1), dtype=torch.int64)
        self._open: dict[int, Sequence] = {}
        self._closed: deque[int] = deque(maxlen=REMEMBERED_CLOSED)

    def open(self, item: OpenItem, eos: tuple[int, ...]) -> Sequence:
        """Take a free slot, or raise Overloaded, StaleMessage (closed) or ProtocolError (open)."""
        if item.sequence in self._open:
            raise ProtocolError(f"sequence {item.sequence} is open already")
        if item.sequence in self._closed:
            raise StaleMessage(f"sequence {item.sequence} was closed; it never computes again")
        if not self._free:
            raise Overloaded(f"all {len(self._open)} slots of the target are taken")
        slot = self._free.popleft()
        sampling = item.sampling
        stops = frozenset(sampling.stop_token_ids) | frozenset(() if sampling.ignore_eos else eos)
        sequence = Sequence(slot, sampling, stops, self._tokens[slot])
        self._open[item.sequence] = sequence
        return sequence

    def get(self, number: int) -> Sequence:
        """The open sequence `number`, or UnknownSequence."""
        try:
            return self._open[number]
        except KeyError:
            raise UnknownSequence(f"sequence {number} is not open") from None

    def close(self, number: int) -> Sequence:
        """Free the slot and remember that `number` ended."""
        sequence = self.get(number)
        del self._open[number]
        self._closed.append(number)
        self._free.append(sequence.slot)
        return sequence
