"""State that outlives its sequence: cut at the end, and continued by another that begins alike.

A target that keeps a row per position is cut anywhere. One that does not (recurrent layers,
windows) goes back within its last forward, by the snapshot from before it, or not at all.
"""

import logging
from typing import Final

import torch

from protocol.transports.base import RingView
from target_daemon.sequences import Retained, Sequence
from target_daemon.target import DFlashTarget

log = logging.getLogger(__name__)

NOBODY: Final = -1
FAILURES: Final = (RuntimeError, ValueError, MemoryError)  # of a cut: the state is given up


class KeptState:
    """Cuts and continues the slots of one target; keeps nothing itself."""

    def __init__(self, target: DFlashTarget, ring: RingView | None, chunk: int) -> None:
        self._target = target
        self._ring = ring
        self._chunk = chunk  # prompts are run in pieces that end at multiples of it

    @torch.inference_mode()
    def cut(self, sequence: Sequence, keep: int) -> bool:
        """Drop what lies at positions from `keep` on.

        False where that cannot be: then nothing that the slot holds may be used again.
        """
        if sequence.lost or keep > sequence.committed:
            return False
        if keep == sequence.committed:
            return True
        try:
            done = self._go_back(sequence, keep)
        except FAILURES as error:
            log.warning("slot %d cannot be cut to %d: %s", sequence.slot, keep, error)
            return False
        if done:
            sequence.committed = keep
        return done

    def _go_back(self, sequence: Sequence, keep: int) -> bool:
        target, slot = self._target, sequence.slot
        if target.supports_cut:
            target.cut(slot, keep)
            return True
        base, snapshot = sequence.before or (keep + 1, None)
        if keep < base:
            return False
        target.restore_kv(slot, snapshot)
        if keep > base:
            target.verify_batch(slot, sequence.tokens[base:keep], base, "none")
        return True

    def begin(self, sequence: Sequence, number: int, left: Retained | None, common: int) -> int:
        """Start `sequence` on what its slot still holds, if its first `common` tokens are there.

        Sets `committed` and `oldest`, gives it the slot's ring rows, and returns the sequence that
        is continued, or -1. Where the ring has lost feature rows of the window that a draft would
        read, that window is run again, if the state can be cut.
        """
        high = 0
        if left is not None:
            sequence.committed, sequence.oldest = left.committed, left.oldest
            high = self._find(sequence, common)
        if not sequence.committed:
            sequence.oldest = high = 0
            self._target.reset(sequence.slot)
        if self._ring is not None:
            self._ring.claim(sequence.slot, number, high)
        return left.number if left is not None and sequence.committed else NOBODY

    def _find(self, sequence: Sequence, common: int) -> int:
        """Cut to where the sequence goes on; returns up to where the ring was written."""
        held, high, at = sequence.committed, 0, common
        if self._ring is not None and self._ring.shape.row_width:
            high = int(self._ring.written_high[sequence.slot])
            sequence.oldest = max(sequence.oldest, high - self._ring.shape.capacity)
        if self._target.supports_cut:
            # From a boundary on, the prompt's rows are bit for bit those of a whole run.
            for at in (self._boundary(common), common):
                if sequence.oldest <= self._first_needed(at):
                    break
            else:
                sequence.oldest = high = at = self._boundary(self._first_needed(common))
        if not at or (at < held and not self.cut(sequence, at)):
            sequence.committed = 0
        return high

    def _first_needed(self, at: int) -> int:
        """The lowest position whose feature row a draft may read for a block at `at`."""
        return max(0, at - self._ring.shape.window) if self._ring is not None else 0

    def _boundary(self, position: int) -> int:
        return position - position % self._chunk
