"""How wide the next block is: what is chosen, for what, and from what it is learned. Pure."""

from collections.abc import Sequence
from typing import ClassVar, Final, Protocol

import msgspec

from protocol.messages import MAX_TOKENS_A_ROUND

# As `Submit.block_width` says it.
AUTO: Final = 0
FULL: Final = MAX_TOKENS_A_ROUND  # the draft's whole block, always


class Situation(msgspec.Struct, frozen=True):
    """What the next round is chosen for."""

    block_size: int  # rows of the draft's whole block; 1 where no draft can be asked
    budget: int  # tokens still wanted: a round of `w` rows emits at most `w`
    position: int  # rows of context before the block


class Choice(msgspec.Struct, frozen=True):
    """Rows to ask of the draft, and how many of them to verify at most; 1: the pending token."""

    propose: int
    verify: int


ALONE: Final = Choice(1, 1)


class Outcome(msgspec.Struct, frozen=True):
    """What a round was and brought."""

    position: int
    rows: int  # verified, whoever proposed them
    offered: tuple[int, ...]  # all that the draft proposed
    drafted: int  # how many of them were verified, up to the first that was overridden
    tokens: tuple[int, ...]  # emitted
    draft_seconds: float
    ingest_seconds: float
    ingested: int  # feature rows that the draft took in
    verify_seconds: float
    confidences: tuple[float, ...] = ()  # of the `offered`, as the draft states them; none: empty

    @property
    def accepted(self) -> int:
        """Of the `drafted`."""
        return min(len(self.tokens) - 1, self.drafted)


class WidthPolicy(Protocol):
    """Chooses the rows of each round, and learns from what came of it."""

    learns: ClassVar[bool]  # whether `choose` depends on what was noted

    def choose(self, situation: Situation) -> Choice:
        """Rows of the next round; changes nothing that a second call would answer otherwise."""
        ...

    def cut(self, choice: Choice, confidences: tuple[float, ...]) -> int:
        """Rows to verify of the round chosen, now that the draft says how sure it is of each slot.

        ``choice.verify``, or fewer, and 1 where no slot is worth its row; nothing is changed.
        """
        ...

    def rows_for(self, tokens: Sequence[float], situation: Situation) -> int:
        """Rows of a round of proposals that cost nothing, in place of the one chosen; 1: none.

        `tokens` are expected of rounds of 1, 2, ... such rows.
        """
        ...

    def note(self, outcome: Outcome) -> None:
        """A round is over."""
        ...

    def reason(self) -> str:
        """Why the draft was hardly used, if so, in words for `mode_reason`; else empty."""
        ...


class FixedWidth:
    """Always `rows`, as far as the draft's block goes: what ``--block-width N`` asks for."""

    learns: ClassVar[bool] = False

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def choose(self, situation: Situation) -> Choice:
        rows = max(1, min(self._rows, situation.block_size, situation.budget))
        return Choice(rows, rows)

    def cut(self, choice: Choice, confidences: tuple[float, ...]) -> int:
        del confidences  # so many rows were asked for
        return choice.verify

    def rows_for(self, tokens: Sequence[float], situation: Situation) -> int:
        del tokens, situation  # the draft's were asked for, or none
        return 1

    def note(self, outcome: Outcome) -> None:
        pass

    def reason(self) -> str:
        return "a block width of 1 was asked for" if self._rows == 1 else ""
