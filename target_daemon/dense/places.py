"""Where the rows of one pass stand: positions, K/V rows, and what each row sees."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from protocol.kernels.attention import causal_mask
from protocol.kernels.rope import Turner
from protocol.trees import depths
from target_daemon.capture import Capture


class Places(ABC):
    """One pass: `count` rows that leave state, and padding up to `rows`, which leaves none."""

    first: int  # position in the feature ring of the first row; the others follow it
    count: int
    rows: int
    reach: int  # no row sees a column from here on

    @property
    @abstractmethod
    def columns(self) -> Tensor | None:
        """K/V rows [count]; None: `first`, `first` + 1, ..."""

    def begin(self, capture: Capture, slot: int) -> None:
        """Tell `capture` where the rows of this pass go."""
        capture.begin(slot, self.first, self.count)

    @abstractmethod
    def angles(self, turner: Turner) -> tuple[Tensor, ...]:
        """What `turner` needs for the rows' positions."""

    @abstractmethod
    def mask(self, length: int, window: int | None, group: int, like: Tensor) -> Tensor:
        """Additive mask [group * rows, length], of the dtype and on the device of `like`."""


class Line(Places):
    """Consecutive positions, each row seeing all before it."""

    def __init__(self, first: int, count: int, rows: int) -> None:
        self.first, self.count, self.rows = first, count, rows
        self.reach = first + rows

    @property
    def columns(self) -> None:
        return None

    def angles(self, turner: Turner) -> tuple[Tensor, ...]:
        return turner.at(self.first, self.reach)

    def mask(self, length: int, window: int | None, group: int, like: Tensor) -> Tensor:
        return causal_mask(
            self.first,
            self.rows,
            length,
            window=window,
            group=group,
            dtype=like.dtype,
            device=like.device,
        )


class Tree:
    """A whole token tree above `base` committed rows, of which each pass computes some rows."""

    def __init__(self, base: int, parents: Sequence[int], places: Sequence[int]) -> None:
        """`places` are the rows' columns, as offsets from `base`."""
        self.base = base
        self.places = tuple(places)
        self.depths = torch.tensor(depths(parents))
        count = len(self.places)
        self.columns = torch.tensor(self.places) + base
        self.lineage = torch.eye(count, dtype=torch.bool)  # [row, row it sees]
        for row, parent in enumerate(parents, start=1):
            self.lineage[row] |= self.lineage[parent]

    @property
    def span(self) -> int:
        """Columns from `base` on that the tree may have written."""
        return max(self.places) + 1

    def part(self, start: int, stop: int, rows: int) -> "Branches":
        """Rows ``start .. stop - 1``, padded to `rows`; their ancestors have been computed."""
        return Branches(self, start, stop, rows)


class Branches(Places):
    """Some rows of a tree, each seeing what is committed and its own ancestors."""

    def __init__(self, tree: Tree, start: int, stop: int, rows: int) -> None:
        self.first, self.count, self.rows = tree.base + start, stop - start, rows
        self.reach = int(tree.columns[:stop].max()) + 1
        self._columns = tree.columns[start:stop]
        self._tree = tree
        # Padding repeats the last row.
        self._rows = torch.arange(start, start + rows).clamp_(max=stop - 1)

    @property
    def columns(self) -> Tensor:
        return self._columns

    def angles(self, turner: Turner) -> tuple[Tensor, ...]:
        return turner.gather(self._tree.depths[self._rows] + self._tree.base)

    def mask(self, length: int, window: int | None, group: int, like: Tensor) -> Tensor:
        tree, base = self._tree, self._tree.base
        depth = tree.depths[self._rows][:, None]
        seen = torch.zeros(self.rows, length, dtype=torch.bool)
        seen[:, :base] = True
        near = tree.lineage[self._rows]
        if window is not None:
            seen[:, :base] = torch.arange(base) > base + depth - window
            near = near & (tree.depths > depth - window)
        # Rows of later passes may lie behind this one's columns; none of them is an ancestor.
        reached = tree.columns < length
        seen[:, tree.columns[reached]] = near[:, reached]
        # Its shape is another in each round, so it is made on the host and moved as a whole.
        mask = torch.zeros(self.rows, length, dtype=like.dtype).masked_fill_(~seen, -torch.inf)
        return mask.repeat(group, 1).to(like.device)
