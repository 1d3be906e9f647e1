"""One forward over several sequences: where its rows stand, and how they attend.

Rows ``0 .. n - 1`` are one of each of the slots ``0 .. n - 1``; groups of them attend together,
each row within its own slot. Behind them lie `Chunk`s: earlier rows of some of these slots. All
keys and values of a layer are written before anything attends, so that a slot's own row sees its
chunk.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from protocol.kernels.rope import Turner

GROUP: Final = 16  # slots that attend together; their keys are read to the longest text's end


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of `slot` at positions ``first .. first + count - 1``."""

    slot: int
    first: int
    count: int


class Taken(Protocol):
    """Takes the outputs of some layers during a forward."""

    @property
    def columns(self) -> Mapping[int, int]:
        """The layers, by what follows them in a row of features."""
        ...

    def take(self, layer: int, hidden: Tensor, /) -> None:
        """The residual stream [rows, hidden] after `layer`; it changes afterwards."""
        ...


class Abreast:
    """The rows of one forward."""

    def __init__(self, positions: Sequence[int], chunks: Sequence[Chunk] = ()) -> None:
        """`positions` [n] of the slots' own rows."""
        self.own = len(positions)
        self.chunks = tuple(chunks)
        own = torch.tensor(positions, dtype=torch.int64)
        slots, places = [torch.arange(self.own)], [own]
        for chunk in self.chunks:
            slots.append(torch.full((chunk.count,), chunk.slot))
            places.append(torch.arange(chunk.first, chunk.first + chunk.count))
        self.slots = torch.cat(slots)  # [rows]
        self.positions = torch.cat(places)  # [rows]
        self._reaches = [position + 1 for position in positions]

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(self.positions)

    def angles(self, turner: Turner) -> tuple[Tensor, ...]:
        """What `turner` needs for the rows' positions."""
        return turner.gather(self.positions)

    def groups(self) -> Iterator[tuple[slice, int]]:
        """Slots whose own rows attend together, and how many columns the longest of them sees."""
        for first in range(0, self.own, GROUP):
            slots = slice(first, min(first + GROUP, self.own))
            yield slots, max(self._reaches[slots])

    def mask(self, slots: slice, length: int, window: int | None, like: Tensor) -> Tensor:
        """Additive mask [slots, 1, 1, length] of the own rows of some slots."""
        position = self.positions[slots, None].to(like.device)
        column = torch.arange(length, device=like.device)
        closed = column > position
        if window is not None:
            closed |= column <= position - window
        mask = torch.zeros(closed.shape, dtype=like.dtype, device=like.device)
        return mask.masked_fill_(closed, -torch.inf)[:, None, None]
