"""How far proposals are believed: the rate at which each slot is right, tracked online. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

PRIOR: Final = 0.5  # of the first slot of a draft that nothing is known of
PRIOR_COUNT: Final = 2.0  # rounds that this counts for, and the rate of the slot before for others
HORIZON: Final = 64.0  # rounds, after which an outcome counts for less than 40 %
RECENT: Final = 0.85  # what a round's surprise is still worth in the next one
# Standard deviations of recent rounds together, from which on the text has changed:
SURPRISE: Final = 2.5  # of how many tokens were right, which vary widely
WORSE: Final = 2.0  # of how often the first one was, less often than expected
CHANGED: Final = 2.0  # rounds that all before a change count for


@dataclass(slots=True)
class Surprise:
    """What was found beyond what was expected, in recent rounds together."""

    found: float = 0.0
    variance: float = 0.0

    def note(self, found: float, mean: float, variance: float) -> None:
        """One more round: what was found, and what was expected."""
        self.found = self.found * RECENT + found - mean
        self.variance = self.variance * RECENT**2 + variance

    def exceeds(self, deviations: float) -> bool:
        """Whether it is so far from 0, and more than one round may differ."""
        return self.found**2 > deviations**2 * self.variance + 1.0


class Acceptance:
    """P(slot i is right, given that all before it were), decayed; slot 0 follows the pending token.

    A slot of which little is known is believed to be like the one before it. It is for proposals of
    which nothing is stated; for others see `launch.confidence`.
    """

    def __init__(self, first: float = PRIOR) -> None:
        """`first`: what is believed of the first slot."""
        self._right = [first * PRIOR_COUNT]
        self._seen = [PRIOR_COUNT]
        self._length = Surprise()  # of how many tokens were right
        self._first = Surprise()  # of whether the first one was

    @property
    def count(self) -> float:
        """Rounds that what is known counts for."""
        return self._seen[0]

    def note(self, accepted: int, offered: int) -> None:
        """A block of `offered` slots had its first `accepted` right.

        Rounds that together lie far from what was expected are a change of the text: what was
        known before it then counts for little. That a text has become worse shows soonest in first
        tokens.
        """
        rate = next(self.rates())
        self._first.note(min(accepted, 1), rate, rate * (1 - rate))
        self._length.note(accepted, *self._expected(offered))
        is_worse = self._first.found < 0 and self._first.exceeds(WORSE)
        if is_worse or self._length.exceeds(SURPRISE):
            self.fade(CHANGED)
            self._length, self._first = Surprise(), Surprise()
        for slot in range(min(accepted + 1, offered)):
            self.note_slot(slot, right=slot < accepted)

    def note_slot(self, slot: int, *, right: bool) -> None:
        """One slot, all before it being right, was right or not."""
        while len(self._seen) <= slot:
            self._right.append(0.0)
            self._seen.append(0.0)
        keep = 1 - 1 / HORIZON
        self._right[slot] = self._right[slot] * keep + right
        self._seen[slot] = self._seen[slot] * keep + 1.0

    def fade(self, count: float) -> None:
        """Let all that is known count as at most `count` rounds: it is old, or of another text.

        The later a slot, the less of it is kept: it is reached less often, so that what is wrong
        about it would stay for longer.
        """
        for slot, seen in enumerate(self._seen):
            if seen > (kept := count / (slot + 1)):
                self._right[slot] *= kept / seen
                self._seen[slot] = kept

    def _expected(self, offered: int) -> tuple[float, float]:
        """Mean and variance of how many of so many slots are right."""
        mean, square, reached = 0.0, 0.0, 1.0
        for slot, rate in enumerate(islice(self.rates(), offered)):
            reached *= rate
            mean += reached
            square += (2 * slot + 1) * reached
        return mean, square - mean * mean

    @property
    def counts(self) -> tuple[list[float], list[float]]:
        """Of each slot: how often it was right, and how often it was reached, decayed."""
        return list(self._right), list(self._seen)

    def restore(self, right: list[float], seen: list[float]) -> None:
        """Begin with what an earlier process knew."""
        self._right, self._seen = list(right), list(seen)

    def copy(self) -> "Acceptance":
        """An independent copy."""
        twin = Acceptance()
        twin.restore(self._right, self._seen)
        return twin

    def rates(self) -> Iterator[float]:
        """P(slot is right | all before it were) of slots 0, 1, ...; without end."""
        rate = self._right[0] / self._seen[0]
        yield rate
        for right, seen in zip(self._right[1:], self._seen[1:], strict=True):
            rate = (right + PRIOR_COUNT * rate) / (seen + PRIOR_COUNT)
            yield rate
        while True:
            yield rate

    def tokens(self, widest: int) -> list[float]:
        """``E[tokens]`` of rounds of 1, 2, ... `widest` rows: one, and each slot reached."""
        found, reached = [1.0], 1.0
        for rate in islice(self.rates(), widest - 1):
            reached *= rate
            found.append(found[-1] + reached)
        return found
