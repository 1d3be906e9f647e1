"""How likely each slot of a block is right, from what the draft states of it. Pure.

A draft states with every proposal how likely it finds it to be right: the share that its own scores
give to the id, or what a head of its own says of it (DSpark). Of the installed draft this is true
as it stands: of 4,858 first slots behind greedy answers to public prompts, those of which 0.0 to
0.1, 0.1 to 0.2, ... was stated were right at 0.05, 0.08, 0.19, 0.31, 0.39, 0.51, 0.61, 0.71, 0.82
and 0.92. So a draft is believed at first, and then as far as it came true: statements are sorted
into bins, and of each is known how often its slots were right, and how often they would have been.
One that says the contrary is understood, and one that says the same of everything is taken for what
it is worth on the whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from launch.policy import Outcome

BINS: Final = 10
PRIOR: Final = 4.0  # slots that were right as often as was stated: what a bin begins with
# What is stated at least. At a high temperature a draft gives each id next to nothing, and is right
# by the noise that it shares: nothing times how often that came true would stay nothing.
FAINT: Final = 0.01
LEAST: Final = 1e-4  # of a bin: more is divided by it
HORIZON: Final = 128.0  # slots of a bin, after which one counts for less than 40 %


@dataclass(slots=True)
class Bin:
    """Slots of which about the same was stated, decayed."""

    right: float
    stated: float  # how many of them would be right if it were true

    def note(self, stated: float, *, right: bool) -> None:
        keep = 1 - 1 / HORIZON
        self.right = self.right * keep + right
        self.stated = self.stated * keep + stated


class Confidence:
    """What the draft of one pair of daemons has stated, and what came of it."""

    def __init__(self) -> None:
        usual = [PRIOR * (one + 0.5) / BINS for one in range(BINS)]
        self._bins = [Bin(right, right) for right in usual]

    @property
    def counts(self) -> tuple[list[float], list[float]]:
        """Of each bin: how many slots were right, and how many would have been, decayed."""
        return [one.right for one in self._bins], [one.stated for one in self._bins]

    def restore(self, right: Sequence[float], stated: Sequence[float]) -> None:
        """Begin with what an earlier process knew, if it had the same bins."""
        if len(right) == len(stated) == BINS and min(stated) >= LEAST:
            self._bins = [Bin(*one) for one in zip(right, stated, strict=True)]

    def chances(self, stated: Sequence[float]) -> list[float]:
        """P(slot is right, all before it being so) where the draft has `stated` so much."""
        told = [max(one, FAINT) for one in stated]
        bins = map(self._of, told)
        return [min(1.0, one * of.right / of.stated) for one, of in zip(told, bins, strict=True)]

    def note(self, outcome: Outcome) -> None:
        """A round is over: of some slots it is known now whether they were right."""
        for stated, right in zip(outcome.confidences, observed(outcome), strict=False):
            self._of(stated).note(max(stated, FAINT), right=right)

    def _of(self, stated: float) -> Bin:
        return self._bins[min(int(stated * BINS), BINS - 1)]


class Confidences:
    """What is known at every temperature that was asked for; near ones share.

    What a draft states of an id that is drawn with noise is true in another way, or less so.
    """

    def __init__(self) -> None:
        self._known: dict[int, Confidence] = {}

    def at(self, temperature: float) -> Confidence:
        return self._known.setdefault(round(temperature * 10), Confidence())

    @property
    def counts(self) -> dict[int, tuple[list[float], list[float]]]:
        """Of all that are known, by tenths of the temperature."""
        return {tenths: one.counts for tenths, one in self._known.items()}

    def restore(self, counts: Mapping[int, tuple[Sequence[float], Sequence[float]]]) -> None:
        """Begin with what an earlier process knew."""
        for tenths, known in counts.items():
            self.at(tenths / 10).restore(*known)


def observed(outcome: Outcome) -> list[bool]:
    """Whether each slot was right, up to the first that was not or of which nothing is known.

    The token behind the last verified proposal decides the one that was cut off.
    """
    found = [True] * outcome.accepted
    if outcome.accepted < min(len(outcome.offered), len(outcome.tokens)):
        found.append(outcome.offered[outcome.accepted] == outcome.tokens[outcome.accepted])
    return found
