"""What the engine asks of a draft network.

A network is one file of this folder that ends in ``NETWORK: Final[type[DraftNetwork]]``; its
module's name is `DraftCheckpointConfig.network`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor

from draft_daemon.context import BlockView
from protocol.checkpoints.draft_facts import DraftCheckpointConfig


class DraftNetwork(ABC):
    """Weights and forward passes; holds no sequence's state."""

    dtype: torch.dtype
    device: torch.device
    needs_logits: ClassVar[bool] = False  # of the target's head: for a head that corrects them

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
