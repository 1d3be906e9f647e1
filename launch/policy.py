"""How wide the next block is. Pure: facts in, a number out."""

from typing import Protocol


class WidthPolicy(Protocol):
    """Chooses the rows of the next verify forward: the pending token and the drafts after it."""

    def width(self, *, block_size: int, budget: int) -> int:
        """Rows, at least 1; at most `block_size`, and at most `budget`, the tokens still wanted.

        A round of `w` rows emits at most `w` tokens, so that wider than the budget is waste.
        """
        ...


class FullWidth:
    """Always the draft's whole block: right when acceptance is high or verifying is flat."""

    def width(self, *, block_size: int, budget: int) -> int:
        return max(1, min(block_size, budget))
