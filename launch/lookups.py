"""N-grams where they pay: what followed a run of tokens before, alone in a round. Pure.

How far such a continuation is right depends on how long the run is, and on the text. Both are
learned from what every round emits, also where nothing was proposed: the target's own tokens say
for nothing whether the first ids of a continuation would have been right.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Final

from launch.acceptance import Acceptance
from launch.journal import Journal
from launch.ngram import RequestNgrams

# How often the first id behind a run of so many tokens was right in greedy answers of the default
# model to 47 public prompts, where nothing else is known.
FIRST: Final = {1: 0.25, 2: 0.55, 3: 0.6, 4: 0.75, 5: 0.85}
OTHER_TEXT: Final = 2.0  # rounds that outcomes of earlier requests count for

Rates = dict[int, Acceptance]  # by the run's length


def unknown() -> Rates:
    """What is believed before anything is known."""
    return {length: Acceptance(first) for length, first in FIRST.items()}


def agreeing(ids: Sequence[int], emitted: Sequence[int]) -> int:
    """How many of the first `ids` are what was emitted."""
    pairs = zip(ids, emitted, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


class Lookups:
    """Of one request; `shared` is what is known from all requests, and learns from this one."""

    def __init__(self, shared: Rates) -> None:
        self._shared = shared
        self._own = {length: rates.copy() for length, rates in shared.items()}
        for rates in self._own.values():
            rates.fade(OTHER_TEXT)
        self._ngrams = RequestNgrams()
        self._run = 0
        self._ids: tuple[int, ...] = ()

    def find(self, journal: Journal, count: int) -> tuple[int, ...]:
        """Up to `count` ids to follow all that was emitted; the same until more is."""
        self._run, ids = self._ngrams.of(journal).find((), count)
        self._ids = tuple(ids)
        return self._ids

    def expected(self) -> list[float]:
        """``E[tokens]`` of rounds of 1, 2, ... rows that propose what was found."""
        return self._own[self._run].tokens(len(self._ids) + 1) if self._run else [1.0]

    def judge(self, emitted: Sequence[int]) -> None:
        """The round behind `find` has emitted these tokens."""
        if not self._run:
            return
        right = agreeing(self._ids, emitted)
        for rates in (self._own[self._run], self._shared[self._run]):
            rates.note(right, min(len(self._ids), len(emitted)))
        self._run = 0
