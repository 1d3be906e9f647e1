"""Which K/V rows a tree's tokens take, so that attention gives what decoding alone would give.

Attention adds up its columns in an order that depends on where they lie: in lanes of a vector
register, in the blocks of a product. A token at depth ``d`` of a tree would lie at column
``base + d`` if it were decoded alone; only one of those that compete for it can. The others are put
a multiple of `stride` further on, where they meet the same lanes, and never across one of `bounds`,
where kernels close a block. Masked columns in between add zeros, which change nothing. Whether that
holds is a property of processor, library, shape and dtype, and is measured at load (`settle`).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from protocol.kernels.attention import attend_folded, padded_length
from protocol.trees import depths
from target_daemon.exactness import AttentionShape

PERIOD: Final = 512  # torch's CPU kernel walks over K in blocks of so many rows
STEP: Final = 64  # bounds are looked for at multiples of this
STRIDES: Final = (16, 32)
NOWHERE: Final = -1
TRIES: Final = 12
SMALL: Final = 2.0**-10


@dataclass(frozen=True, slots=True)
class Columns:
    """The rule of one target. Without a stride, rows lie one behind the other: nothing is exact."""

    stride: int = 0
    bounds: tuple[int, ...] = ()  # offsets below PERIOD that must not lie between a token's places

    def place(self, base: int, parents: Sequence[int]) -> tuple[int, ...]:
        """Each row's column, as an offset from `base`; NOWHERE for a row that has no exact one.

        A row whose parent is nowhere is nowhere, too. Columns ascend along every path.
        """
        if not self.stride:
            return tuple(range(len(parents) + 1))
        places, taken = [0], {0}
        for parent, depth in zip(parents, depths(parents)[1:], strict=True):
            above, place = places[parent], depth
            while place in taken or place <= above:
                place += self.stride
            exact = above != NOWHERE and self._cell(base + place) == self._cell(base + depth)
            places.append(place if exact else NOWHERE)
            taken.add(places[-1])
        return tuple(places)

    def _cell(self, column: int) -> int:
        turns, offset = divmod(column, PERIOD)
        return turns * (len(self.bounds) + 1) + bisect_right(self.bounds, offset)


def settle(shape: AttentionShape, multiple: int, widths: Sequence[int]) -> Columns | None:
    """Measure which places are exact with K padded to `multiple`; None where none is.

    `widths` are the numbers of rows that forwards have: the narrowest, the widest, some between.
    """
    probe = _Probe(shape, multiple, widths)
    bounds = tuple(
        bound
        for bound in range(STEP, PERIOD, STEP)
        if not all(probe.moves(at + bound - 5, at + bound - 5 + STEP) for at in probe.starts)
    )
    for stride in STRIDES:
        rule = Columns(stride, bounds)
        if all(probe.keeps(rule, base) for base in probe.bases):
            return rule
    return None


class _Probe:
    """Compares a token at its own column with the same token elsewhere, bit for bit.

    Values cancel, so that what is left of them is rounding, and a sum in another order shows even
    after it was rounded to bf16.
    """

    def __init__(self, shape: AttentionShape, multiple: int, widths: Sequence[int]) -> None:
        generator = torch.Generator().manual_seed(2)
        longest = min(shape.capacity, 3 * PERIOD) // PERIOD * PERIOD
        size = (1, shape.kv_heads, longest // STEP, 2, STEP // 2, shape.head_dim)
        key, value = (torch.randn(size, generator=generator) for _ in range(2))
        key[:, :, :, 1], value[:, :, :, 1] = key[:, :, :, 0], -value[:, :, :, 0]
        self._key, self._value = (
            rows.view(1, shape.kv_heads, longest, -1).to(shape.device, shape.dtype)
            for rows in (key, value)
        )
        self._queries = [
            torch.randn(1, shape.kv_heads, width * shape.group, shape.head_dim, generator=generator)
            for width in widths
        ]
        self._multiple, self._longest = multiple, longest
        self.starts = range(0, longest, PERIOD)
        self.bases = range(7, longest - STEP, longest // TRIES)

    def moves(self, column: int, place: int) -> bool:
        """Whether a token keeps its row's bits when it lies at `place` instead of at `column`."""
        return self._same(column, {column: place})

    def keeps(self, rule: Columns, base: int) -> bool:
        """Whether the last token of each side branch of a tree has the bits that a chain's has."""
        places = rule.place(base, (0, 1, 2, 0, 4, 5, 0, 7, 8))
        for rows in ((4, 5, 6), (7, 8, 9)):
            if places[rows[-1]] != NOWHERE:
                moved = {base + depth: base + places[row] for depth, row in enumerate(rows, 1)}
                if not self._same(base + len(rows), moved):
                    return False
        return True

    def _same(self, last: int, moved: dict[int, int]) -> bool:
        """A row at position `last`, its K/V in place and with the columns of `moved` elsewhere."""
        own, others = list(moved), list(moved.values())
        stop = padded_length(max(last, *others) + 1, self._longest, self._multiple)
        key, value = (rows[:, :, :stop].clone() for rows in (self._key, self._value))
        value[:, :, own] *= SMALL
        plain = self._attend(key, value, list(range(last + 1)))
        for rows in (key, value):
            rows[:, :, others] = rows[:, :, own]
            rows[:, :, own] = 7.0
        seen = sorted({*range(last + 1)} - {*own} | {*others})
        return all(map(torch.equal, plain, self._attend(key, value, seen)))

    def _attend(self, key: Tensor, value: Tensor, seen: list[int]) -> list[Tensor]:
        length = padded_length(seen[-1] + 1, self._longest, self._multiple)
        mask = torch.full((1, length), -torch.inf, dtype=key.dtype, device=key.device)
        mask[:, seen] = 0.0
        scale = key.shape[-1] ** -0.5
        rows = (key[:, :, :length], value[:, :, :length])
        return [
            attend_folded(query.to(key), *rows, mask.repeat(query.shape[2], 1)[None, None], scale)
            for query in self._queries
        ]
