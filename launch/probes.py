"""Asking the draft now and then, while it is not worth being asked. Pure.

A change of the text must be seen within 20 rounds, and a useless draft may cost a twentieth of the
time. So a probe comes 3 rounds after the draft was left, 6 after that, and then every 10, twice
within 20, as long as it costs less than 0.38 rounds; where it costs more, probes come later, by the
share of the time that they may take.
"""

from dataclasses import dataclass
from typing import Final

FIRST: Final = 10  # rounds without the draft, after which it is asked: twice within 20
RAREST: Final = 256
SHARE: Final = 0.035  # of the time, that probes which fail may take
WHOLE: Final = 24  # every so many-th probe verifies what it proposed: prices grow old, too
SOON: Final = 3  # rounds to the first probe after the draft was left


@dataclass(slots=True)
class Probes:
    """When the next one is due: rarer as they fail."""

    since: int = FIRST  # rounds since the draft was asked; a request may begin with a probe
    interval: int = FIRST
    made: int = 0

    @property
    def is_due(self) -> bool:
        return self.since >= self.interval

    @property
    def is_whole(self) -> bool:
        """Whether to verify all that is proposed."""
        return self.made % WHOLE == WHOLE - 1

    def begin(self) -> None:
        """One is made in this round."""
        self.since = 0
        self.made += 1

    def fail(self, price: float, *, again: int = RAREST) -> None:
        """It did not pay; a probe costs `price` rounds without the draft.

        `again`: it promises something, so that the next one comes after so many rounds.
        """
        bound = min(max(FIRST, int(price / SHARE)), RAREST)
        self.interval = min(2 * self.interval, bound)
        self.since = max(0, self.interval - again)

    def start_over(self) -> None:
        """The draft is in use. It may be left for a few blocks of which it was not sure."""
        self.since, self.interval = 0, SOON
