"""What a draft's own confidence in each slot is worth, learned from what came of it. Pure.

A draft may state with every proposal how likely it finds it to be right (DSpark). It is not taken
at its word: statements are sorted into bins, and of each bin it is counted how often its slots
were right against how often slots of their place are right anyhow. Only what is beyond chance
counts, so that a draft that states nothing of use changes nothing; one that states the contrary is
understood, too.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import Final

from launch.policy import Outcome

BINS: Final = 8
PRIOR: Final = 2.0  # slots that were right as often as their place says: what a bin begins with
HORIZON: Final = 64.0  # rounds, after which a slot counts for less than 40 %
FEWEST: Final = 2  # rows of a block that was cut: what the draft is worth must stay known
GAIN: Final = 0.02  # tokens that a cut must save: less is noise


@dataclass(slots=True)
class Bin:
    """Slots of which about the same was stated, decayed."""

    right: float = 0.0
    expected: float = 0.0  # by the rates of their places
    variance: float = 0.0  # of how many are right, if what was stated says nothing

    @property
    def lift(self) -> float:
        """By how much more often its slots are right than others of their places."""
        beyond = self.right - self.expected
        beyond -= min(max(beyond, -sqrt(self.variance)), sqrt(self.variance))
        return 1 + beyond / (self.expected + PRIOR)

    def fade(self) -> None:
        keep = 1 - 1 / HORIZON
        self.right, self.expected = self.right * keep, self.expected * keep
        self.variance *= keep

    def note(self, rate: float, *, right: bool) -> None:
        """One slot, which `rate` would have expected to be right."""
        self.right += right
        self.expected += rate
        self.variance += rate * (1 - rate)


class Confidence:
    """What the draft of one pair of daemons has stated, and what came of it."""

    def __init__(self) -> None:
        self._bins = [Bin() for _ in range(BINS)]

    def rates(self, usual: Iterable[float], stated: Sequence[float]) -> list[float]:
        """P(slot is right, all before it being so) of a block whose draft has `stated` so much.

        `usual` are the rates of the slots whatever is stated.
        """
        pairs = zip(usual, stated, strict=False)
        return [min(1.0, max(0.0, rate * self._of(one).lift)) for rate, one in pairs]

    def note(self, usual: Iterable[float], outcome: Outcome) -> None:
        """A round is over: of some slots it is known now whether they were right."""
        for one in self._bins:
            one.fade()
        known = observed(outcome)
        for rate, stated, right in zip(usual, outcome.confidences, known, strict=False):
            self._of(stated).note(rate, right=right)

    def _of(self, stated: float) -> Bin:
        return self._bins[min(int(stated * BINS), BINS - 1)]


def observed(outcome: Outcome) -> list[bool]:
    """Whether each slot was right, up to the first that was not or of which nothing is known.

    The token behind the last verified proposal decides the one that was cut off.
    """
    found = [True] * outcome.accepted
    if outcome.accepted < min(len(outcome.offered), len(outcome.tokens)):
        found.append(outcome.offered[outcome.accepted] == outcome.tokens[outcome.accepted])
    return found


def worthwhile(rates: Sequence[float], seconds: Sequence[float], usual: float) -> int:
    """How many rows to verify: the tokens that they emit, less what their time emits elsewhere.

    `rates` are those of the slots, `seconds` of rounds of 1, 2, ... rows, from which only their
    differences count, and `usual` the tokens a second that decoding makes otherwise.
    """
    worth, reached = [0.0], 1.0
    for rate, (less, more) in zip(rates, pairwise(seconds), strict=False):
        reached *= rate
        worth.append(worth[-1] + reached - usual * (more - less))
    whole = len(worth)
    best = max(range(whole), key=worth.__getitem__) + 1
    best = max(best, min(FEWEST, whole))
    return best if worth[best - 1] > worth[-1] + GAIN else whole
