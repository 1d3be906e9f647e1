"""What rounds with a draft make of their time, of late. Pure.

A round asks for some rows, and verifies those that emit more than their time would elsewhere. Time
is weighed at a rate, in tokens a second.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from operator import mul
from typing import Final

HORIZON: Final = 4.0  # rounds with a draft, after which one counts for less than 40 %


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds, by rows from one on; a round with a draft costs `ask` of what was proposed too."""

    verify: Sequence[float]  # and one hand-over
    ask: Sequence[float]  # block, ingest and the other hand-over; 0 for one row

    @property
    def alone(self) -> float:
        """Tokens a second without the draft."""
        return 1 / self.verify[0]


def emitted(chances: Sequence[float]) -> list[float]:
    """``E[tokens]`` of rounds of 1, 2, ... rows whose slots are right with such chances."""
    reached = list(accumulate(chances, mul))
    return list(accumulate(reached, initial=1.0))


def worthwhile(tokens: Sequence[float], verify: Sequence[float], rate: float) -> list[int]:
    """How many rows to verify of 1, 2, ... proposed ones, where time makes `rate` tokens a second.

    `tokens` are what so many rows emit, and `verify` their seconds.
    """
    best, most, found = 1, -float("inf"), []
    for rows, (made, seconds) in enumerate(zip(tokens, verify, strict=True), start=1):
        if (value := made - rate * seconds) > most:
            best, most = rows, value
        found.append(best)
    return found


@dataclass(slots=True)
class Worth:
    """Tokens and seconds of rounds that ask for 1, 2, ... rows, decayed; 1: none were asked for."""

    tokens: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    rounds: float = 0.0  # that these are of

    def add(self, block: "Worth") -> None:
        """One more round."""
        self.fade(1 - 1 / HORIZON)
        self.tokens = [a + b for a, b in zip_longest(self.tokens, block.tokens, fillvalue=0.0)]
        self.seconds = [a + b for a, b in zip_longest(self.seconds, block.seconds, fillvalue=0.0)]
        self.rounds += block.rounds

    def fade(self, share: float) -> None:
        """Let what is known count for so much less."""
        self.tokens = [one * share for one in self.tokens]
        self.seconds = [one * share for one in self.seconds]
        self.rounds *= share

    def rates(self) -> list[float]:
        """Tokens a second of rounds that ask for 1, 2, ... rows; empty while unknown."""
        return [made / spent for made, spent in zip(self.tokens, self.seconds, strict=True)]

    def copy(self) -> "Worth":
        """An independent copy."""
        return Worth(list(self.tokens), list(self.seconds), self.rounds)


def weighed(tokens: Sequence[float], prices: Prices, verified: Sequence[int]) -> Worth:
    """One block: `tokens` are what so many rows emit, `verified` are of so many proposed ones."""
    spent = [prices.verify[rows - 1] + ask for rows, ask in zip(verified, prices.ask, strict=True)]
    return Worth([tokens[rows - 1] for rows in verified], spent, 1.0)
