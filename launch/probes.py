"""Trying wider blocks now and then, while less than that seems best. Pure.

A change of the text must be seen within 20 rounds, and a useless draft may cost a twentieth of the
time. So a probe comes every 16 rounds, as long as it costs less than 0.64 rounds; where even the
draft's narrowest block costs more, probes come later, by the share of the time that they may take.
"""

from dataclasses import dataclass
from typing import Final

FIRST: Final = 16  # rounds below full width, after which a wider block is proposed
RAREST: Final = 256
SHARE: Final = 0.04  # of the time, that probes which fail may take
WHOLE: Final = 32  # every so many-th probe verifies what it proposed: prices grow old, too
SCOUT: Final = 2  # rows of a probe that is only proposed: one token, right or wrong
AGAIN: Final = 5  # rounds to the next probe, where one was right unexpectedly and the next was not


@dataclass(slots=True)
class Probes:
    """When the next one is due: rarer as they fail, and at once after one that has paid."""

    since: int = FIRST  # rounds since the last one; a request may begin with one
    interval: int = FIRST
    trial: bool = False  # the last one has paid
    made: int = 0

    @property
    def is_due(self) -> bool:
        return self.trial or self.since >= self.interval

    @property
    def is_whole(self) -> bool:
        """Whether to verify at once what is proposed."""
        return self.trial or self.made % WHOLE == WHOLE - 1

    def begin(self) -> None:
        """One is made in this round."""
        self.since = 0
        self.made += 1
        self.trial = False

    def fail(self, price: float, *, in_doubt: bool) -> None:
        """It did not pay; a probe costs `price` rounds of the width in use.

        `in_doubt`: the one before it did, which was not to be expected.
        """
        bound = min(max(FIRST, int(price / SHARE)), RAREST)
        self.interval = min(2 * self.interval, bound)
        if in_doubt:
            self.since = max(self.since, self.interval - AGAIN)

    def start_over(self) -> None:
        """Another width is in use."""
        self.interval = FIRST
        self.trial = False


@dataclass(slots=True)
class Shadow:
    """A block that was proposed and not verified, held against what the target then chooses."""

    ids: tuple[int, ...]
    right: int = 0  # slots that have turned out right
    is_over: bool = False  # a slot was wrong, or all were right

    def meet(self, token: int) -> bool:
        """The target's next token; whether the next slot, which it decides, was right."""
        found = self.ids[self.right] == token
        self.right += found
        self.is_over = not found or self.right == len(self.ids)
        return found
