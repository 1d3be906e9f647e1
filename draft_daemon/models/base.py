"""What the engine asks of a draft network.

A network is one file of this folder that ends in ``NETWORK: Final[type[DraftNetwork]]``; its
module's name is `DraftCheckpointConfig.network`. ``PUBLISHED`` says what published files call it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from draft_daemon.context import BlockView
from protocol.checkpoints.draft_facts import DraftCheckpointConfig


@dataclass(frozen=True, slots=True)
class Scored:
    """What one slot may hold, given the tokens before it."""

    scores: Tensor  # [n] float32
    ids: Tensor | None = None  # [n] int64, ascending: the target's ids of them; None: 0 .. n-1
    confidence: float | None = None  # how likely the draft finds it that its choice is the target's


class DraftHead(ABC):
    """Corrects what the target's head says of a block's slots, by the tokens chosen before them."""

    pooled: ClassVar[bool] = False  # whether it may be asked about a part of the ids: see `walk`

    @abstractmethod
    def walk(
        self, hidden: Tensor, scores: Tensor, pending: int, columns: Tensor | None = None
    ) -> Generator[Scored, int, None]:
        """Yield each slot's scores in order; `send` takes the token that was chosen for it.

        `hidden` [slots, hidden] are the block's normed rows and `scores` [slots, n] float32 what
        the target's head makes of them; `pending` is the token before the first slot. `columns` [n]
        are the rows of the head, of all that it scores, that `scores` are of; None: all of them.
        """


@dataclass(frozen=True, slots=True)
class Lent:
    """What a head is given of the target's, once per pairing."""

    ids: Tensor | None  # [n] int64, ascending: whose scores the head's rows are; None: 0 .. n-1
    count: int  # n
    embed: Callable[[Tensor], Tensor]  # ids [k] -> rows [k, hidden], as a block's


class DraftNetwork(ABC):
    """Weights and forward passes; holds no sequence's state."""

    dtype: torch.dtype
    device: torch.device
    needs_logits: ClassVar[bool] = False  # of the target's head: whether `head` corrects them
    aliases: ClassVar[Mapping[str, str]] = {}  # names of tensors in some files -> those of `shapes`

    @classmethod
    @abstractmethod
    def shapes(cls, config: DraftCheckpointConfig) -> Mapping[str, tuple[int, ...]]:
        """Every tensor the network needs, by its name in the checkpoint."""

    @classmethod
    @abstractmethod
    def build(
        cls, config: DraftCheckpointConfig, get: Callable[[str], Tensor], dtype: torch.dtype
    ) -> Self:
        """Lay out the tensors that `get` returns for computing in `dtype`; keeps none of them."""

    @abstractmethod
    def project_context(self, features: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """K and V of context rows at positions ``start ..``.

        `features` [n, taps * hidden], any float dtype. Returns two tensors
        [n, layers, kv_heads, head_dim] that depend on each row and its position alone.
        """

    @abstractmethod
    def block(self, embedded: Tensor, view: BlockView) -> Tensor:
        """Run the rows of one block, `embedded` [width, hidden]; returns normed hidden rows."""

    def head(self, lent: Lent) -> DraftHead:
        """What stands behind the target's head, where `needs_logits`."""
        del lent
        raise NotImplementedError(f"{type(self).__name__} corrects no scores")


def rows_of(weight: Tensor, lent: Lent, *, reduced: bool) -> Tensor:
    """The rows of `weight` [ids, in] that belong to the ids that are scored.

    `reduced`: whether its rows are those of the draft's own vocabulary, as the scores are. Rows
    that are chosen one by one are copied once; fewer at the end are a view.
    """
    if reduced:
        return weight
    return weight[: lent.count] if lent.ids is None else weight.index_select(0, lent.ids)
