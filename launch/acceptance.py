"""How far a draft is believed: the rate at which each slot is right, tracked online. Pure."""

from collections.abc import Iterator
from itertools import islice
from typing import Final

PRIOR: Final = 0.5  # of the first slot of a draft that nothing is known of
PRIOR_COUNT: Final = 2.0  # rounds that this counts for, and the rate of the slot before for others
HORIZON: Final = 64.0  # rounds, after which an outcome counts for less than 40 %
RECENT: Final = 0.85  # what a round's surprise is still worth in the next one
SURPRISE: Final = 2.5  # standard deviations of recent rounds together: the text has changed
CHANGED: Final = 2.0  # rounds that all before a change count for


class Acceptance:
    """P(slot i is right, given that all before it were), decayed; slot 0 follows the pending token.

    A slot of which little is known is believed to be like the one before it. What a draft states of
    the block at hand is held against these rates: `launch.confidence`.
    """

    def __init__(self) -> None:
        self._right = [PRIOR * PRIOR_COUNT]
        self._seen = [PRIOR_COUNT]
        self._surprise = 0.0  # accepted beyond what was expected, decayed
        self._variance = 0.0

    @property
    def count(self) -> float:
        """Rounds that what is known counts for."""
        return self._seen[0]

    def note(self, accepted: int, offered: int) -> None:
        """A block of `offered` slots had its first `accepted` right.

        Rounds that together lie far from what was expected are a change of the text: what was
        known before it then counts for little.
        """
        mean, variance = self._expected(offered)
        self._surprise = self._surprise * RECENT + accepted - mean
        self._variance = self._variance * RECENT**2 + variance
        if self._surprise**2 > SURPRISE**2 * self._variance + 1.0:
            self.fade(CHANGED)
            self._surprise = self._variance = 0.0
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
