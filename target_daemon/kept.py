"""State that outlives its sequence: cut at the end, and continued by another that begins alike.

It stays in its slot until another sequence needs that, and goes into the store of prefixes then. A
target that keeps a row per position is cut anywhere. One that does not (recurrent layers, windows)
goes back within its last forward, by the snapshot from before it, or not at all; of such a one the
store also has the state before the last chunk of each prompt.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from protocol.codec import unpack_tokens
from protocol.feature_ring import spans
from protocol.messages import OpenItem, Sampling
from protocol.transports.base import RingView, gather
from target_daemon.capture import publish
from target_daemon.checks import Limits
from target_daemon.prefixes import NOBODY, Entry, Prefix, PrefixStore, Shelf, common_length
from target_daemon.sequences import Retained, Sequence, Sequences
from target_daemon.target import DFlashTarget

log = logging.getLogger(__name__)

FAILURES: Final = (RuntimeError, ValueError, MemoryError)  # of a cut or copy: it is given up


@dataclass(frozen=True, slots=True)
class Found:
    """State for the beginning of a text: in a slot, or in the store."""

    at: int  # where the text goes on
    common: int  # up to where the texts are the same; more than `at`: what is between is run again
    held: int  # all positions that have state there
    number: int
    slot: int = NOBODY
    entry: Entry | None = None  # of the store

    @property
    def rank(self) -> tuple[int, int, int]:
        """More is better: state to go on from; then no copy, then little besides that is lost."""
        nearness = 2 if self.entry is None else int(isinstance(self.entry, Prefix))
        return self.at, nearness, -self.held


class KeptState:
    """Cuts, keeps and continues the slots of one target."""

    def __init__(
        self,
        target: DFlashTarget,
        ring: RingView | None,
        book: Sequences,
        limits: Limits,
        shelf: Shelf | None,
    ) -> None:
        self._target = target
        self._ring = ring if ring is not None and ring.shape.row_width else None
        self._claimed = ring
        self._book = book
        self._chunk = limits.prefill_chunk
        self.store = PrefixStore(limits.prefix_bytes, cuttable=target.supports_cut, shelf=shelf)

    # --- the end of a sequence -----------------------------------------------------------------

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

    def mark(self, sequence: Sequence, retains: bool) -> None:
        """The last chunk of a prompt comes: of state that cannot be cut, keep what there is now."""
        if retains and sequence.committed and not self._target.supports_cut:
            left = Retained(NOBODY, sequence.committed, sequence.oldest)
            self._copy(sequence.slot, left, in_memory=True)

    # --- the beginning of a sequence -----------------------------------------------------------

    def open(self, item: OpenItem, sampling: Sampling) -> tuple[Sequence, int]:
        """Take a slot for a sequence, which goes on from the most that is kept of its `prefix`.

        Sets `committed` and `oldest`, gives it the slot's ring rows, and returns the sequence that
        is continued, or -1. Raises as `Sequences.check`.
        """
        self._book.check(item.sequence)
        found, prefix = self._fetch(item)
        slot = self._book.emptiest() if found is None or prefix else found.slot
        left = self._book.retained.get(slot)
        if left is not None:
            kept = 0 if found is None or prefix else found.at
            # Less than a chunk is run again by one forward; more is worth a copy.
            if left.committed - kept >= (self._chunk if kept else 1):
                self._copy(slot, left)
        sequence = self._book.open(item, sampling, slot)
        high = 0
        if found is not None:
            high = self._go_on(sequence, found, prefix, left)
        if not sequence.committed:
            sequence.oldest = high = 0
            self._target.reset(slot)
        self._claim(sequence, item.sequence, high)
        return sequence, found.number if found is not None and sequence.committed else NOBODY

    def _fetch(self, item: OpenItem) -> tuple[Found | None, Prefix | None]:
        """What saves most of the prefix, and the copy of it where it lies in the store."""
        while (found := self._best(item)) is not None and found.entry is not None:
            if (prefix := self.store.get(found.entry)) is not None:
                return found, prefix
        return found, None

    def _best(self, item: OpenItem) -> Found | None:
        wanted = torch.tensor(unpack_tokens(item.prefix), dtype=torch.int64)
        first = self._first_needed(wanted.shape[0] + 1, item.draft_context)
        return max(self._all(wanted, first), key=lambda found: found.rank, default=None)

    def _all(self, wanted: Tensor, first: int) -> Iterator[Found]:
        for slot, left in self._book.retained.items():
            tokens = self._book.tokens(slot)[: left.committed]
            common = common_length(tokens, wanted)
            if at := self._resume(left.committed, self._oldest(slot, left), common, first):
                yield Found(at, common, left.committed, left.number, slot)
        for entry in self.store:
            common = common_length(entry.tokens, wanted)
            if at := self._resume(entry.committed, entry.oldest, common, first):
                yield Found(at, common, entry.committed, entry.number, entry=entry)

    def _resume(self, held: int, oldest: int, common: int, first: int) -> int:
        """Where a text goes on that has its first `common` of `held` positions in common.

        A draft needs feature rows from `first` on. Where some of them are gone they are run again,
        if the state can be cut; else a gap is legal.
        """
        if not self._target.supports_cut:
            return held if common == held else 0
        return common if common <= first or oldest <= first else first

    def _first_needed(self, end: int, context: int) -> int:
        """The lowest position whose feature row a draft may read for a block at `end` or later."""
        if self._ring is None:
            return end
        window = self._ring.shape.window
        return max(0, end - min(context or window, window))

    def _go_on(
        self, sequence: Sequence, found: Found, prefix: Prefix | None, left: Retained | None
    ) -> int:
        """Bring the slot's state to where the sequence goes on; returns the ring's height.

        Where that fails, or is nothing, `committed` is 0.
        """
        high = found.at
        if prefix is not None:
            self._restore(sequence, prefix, found.at)
        elif left is not None:
            sequence.committed, sequence.oldest = left.committed, self._oldest(found.slot, left)
            if self._ring is not None:
                high = int(self._ring.written_high[found.slot])
            if not self.cut(sequence, found.at):
                sequence.committed = 0
        if found.at < found.common or sequence.oldest >= found.at:
            # No row is gone on from: a height of the text before would make new ones look old.
            sequence.oldest = high = found.at
        return high

    @torch.inference_mode()
    def _restore(self, sequence: Sequence, prefix: Prefix, at: int) -> None:
        """Copy the first `at` positions of a prefix into the sequence's slot."""
        slot = sequence.slot
        self._target.reset(slot)
        try:
            self._target.set_state(slot, prefix.state, at)
        except FAILURES as error:
            log.warning("a kept prefix of %d positions is not usable: %s", at, error)
            return
        sequence.tokens[:at] = prefix.tokens[:at]
        sequence.committed, sequence.oldest = at, min(prefix.oldest, at)
        if self._ring is not None:
            capacity = self._ring.shape.capacity
            sequence.oldest = min(max(prefix.oldest, at - capacity), at)
            for span in spans(sequence.oldest, at, capacity):
                rows = prefix.rows[span.start - prefix.oldest : span.stop - prefix.oldest]
                self._ring.rows[slot, span.row : span.row + rows.shape[0]].copy_(rows)
            publish(self._ring, slot, sequence.oldest, at)

    # --- feature rows and copies -----------------------------------------------------------------

    def _oldest(self, slot: int, left: Retained) -> int:
        """The lowest position whose feature row the ring still has."""
        if self._ring is None:
            return left.oldest
        high = int(self._ring.written_high[slot])
        return max(left.oldest, high - self._ring.shape.capacity)

    def _claim(self, sequence: Sequence, number: int, high: int) -> None:
        if self._claimed is not None:
            self._claimed.claim(sequence.slot, number, high)

    @torch.inference_mode()
    def _copy(self, slot: int, left: Retained, *, in_memory: bool = False) -> None:
        """Put what the slot holds into the store, where it fits there and is new to it.

        With `in_memory` nowhere else: a prompt does not wait for a disk.
        """
        tokens = self._book.tokens(slot)[: left.committed]
        size = self._target.state_bytes(slot, left.committed)
        if not size or self.store.knows(tokens):
            return
        oldest = min(self._oldest(slot, left), left.committed)
        if self._ring is not None:
            row = self._ring.shape.row_width * self._ring.rows.element_size()
            size += (left.committed - oldest) * row
        try:
            lasts = self.store.lasts(size + tokens.nbytes)
            if lasts or (self.store.has_shelf and not in_memory):
                self.store.put(self._prefix(slot, left, oldest, lasts=lasts))
        except FAILURES as error:
            log.warning("what slot %d holds cannot be kept: %s", slot, error)

    def _prefix(self, slot: int, left: Retained, oldest: int, *, lasts: bool) -> Prefix:
        """What the slot holds; unless it `lasts`, until the next forward there."""
        rows = torch.empty(0, 0)
        if self._ring is not None:
            rows = gather(self._ring, slot, oldest, left.committed)
        tokens = self._book.tokens(slot)[: left.committed].clone()
        state = self._target.copy_state(slot, left.committed, shared=not lasts)
        return Prefix(tokens, state, rows, left.number)

    def forget_numbers(self) -> None:
        """Sequences are numbered anew: no new one is to be taken for one that left state."""
        for slot, left in self._book.retained.items():
            self._book.retained[slot] = replace(left, number=NOBODY)
        self.store.forget_numbers()

    @torch.inference_mode()
    def save_all(self, seconds: float) -> None:
        """The process ends: put what is kept on the shelf, the latest first, for so long."""
        if not self.store.has_shelf:
            return
        ends = time.monotonic() + seconds
        for slot, left in reversed(self._book.retained.items()):
            if self._target.state_bytes(slot, left.committed) and time.monotonic() < ends:
                oldest = min(self._oldest(slot, left), left.committed)
                self.store.save(self._prefix(slot, left, oldest, lasts=False))
        for prefix in self.store.held:
            if time.monotonic() < ends:
                self.store.save(prefix)
