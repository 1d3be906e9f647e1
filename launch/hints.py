"""Proposals that no draft made: a caller's hints, and n-grams; verified like any other."""

from collections.abc import Mapping
from typing import Literal

from launch.draft_side import Block
from launch.journal import Journal
from launch.ngram import NgramLookup
from launch.token_ids import pack_ids, unpack_ids

Mode = tuple[Literal["speculative", "autoregressive"], str]


def overlay(
    proposed: bytes, hints: Mapping[int, int], first: int, widest: int
) -> tuple[bytes, frozenset[int]]:
    """Put hints over proposals, and behind them as far as they reach without a hole.

    Proposal ``i`` would be generated token ``first + i``, which is the key of `hints`. At most
    `widest` proposals come back, with the indices of those that are hints.
    """
    ids = list(unpack_ids(proposed)[:widest])
    hinted = {index for index in range(len(ids)) if first + index in hints}
    for index in hinted:
        ids[index] = hints[first + index]
    while len(ids) < widest and first + len(ids) in hints:
        hinted.add(len(ids))
        ids.append(hints[first + len(ids)])
    return pack_ids(ids), frozenset(hinted)


class Guesses:
    """Completes each round's block: hints override the draft, n-grams go on behind both."""

    def __init__(self, hints: Mapping[int, int], *, ngram: bool) -> None:
        self._hints = hints
        self._ngram = NgramLookup() if ngram else None
        self._known = 0  # bytes of prompt and output that the n-grams have taken in
        self._used = False

    def complete(self, block: Block, journal: Journal, widest: int) -> None:
        """Change `block` to at most `widest` proposals for the tokens after the pending one."""
        if self._hints:
            hinted = overlay(block.proposed, self._hints, journal.emitted, widest)
            block.proposed, block.hinted = hinted
        if self._ngram is not None:
            self._look_up(self._ngram, block, journal, widest)
        self._used = self._used or bool(block.hinted or block.looked_up)

    def _look_up(self, ngram: NgramLookup, block: Block, journal: Journal, widest: int) -> None:
        if not self._known:
            ngram.extend(unpack_ids(journal.prompt))
        emitted = journal.tokens
        ngram.extend(unpack_ids(emitted[self._known :]))
        self._known = len(emitted)
        ids = unpack_ids(block.proposed)
        found = ngram.propose(ids, widest - len(ids))
        block.proposed = pack_ids((*ids, *found))
        block.looked_up = frozenset(range(len(ids), len(ids) + len(found)))

    def mode(self, mode: Mode) -> Mode:
        """The request's mode: blocks were verified without a draft if guesses made some."""
        if mode[0] == "speculative" or not self._used:
            return mode
        return "speculative", f"guesses alone: {mode[1]}"
