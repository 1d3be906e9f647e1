"""The seam between the target's feature rows and the draft: two halves per transport.

A transport is one file that ends in ``TRANSPORT: Final[type[FeatureTransport]]``. The host half
lives in the target daemon and owns all memory; the guest half lives in the draft daemon and can
only read.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from protocol.feature_ring import RingShape


@dataclass(frozen=True)
class RingView:
    """The target's writable view of the ring."""

    shape: RingShape
    owner: Tensor  # [slots], int64: the sequence each slot's rows belong to; -1: none
    written_high: Tensor  # [slots], int64: highest position ever written + 1
    rows: Tensor  # [slots, capacity, row_width]


@dataclass(frozen=True)
class Rows:
    """A copy of feature rows ``start .. start + rows.shape[0] - 1``, known to be whole."""

    start: int
    rows: Tensor  # [n, row_width]


@dataclass(frozen=True)
class WeightSpec:
    """Shape and dtype of one of the target's tensors that the draft borrows."""

    shape: tuple[int, ...]
    dtype: str


class FeatureHost(ABC):
    """The target's half: allocates the ring and the shared weights, and offers them."""

    @abstractmethod
    def create_ring(self, shape: RingShape) -> RingView:
        """Allocate the ring, zeroed, with no owner in any slot. Called once."""

    @abstractmethod
    def create_weights(self, specs: Mapping[str, WeightSpec]) -> dict[str, Tensor]:
        """Allocate uninitialised tensors that the target fills before it offers them."""

    @abstractmethod
    def offer(self, nonce: int, life: int) -> None:
        """Seal what was created and listen for a guest that states this nonce and life."""

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that becomes readable when `serve` has something to do."""

    @abstractmethod
    def serve(self) -> None:
        """Answer waiting guests; never blocks; a bad or foreign guest is refused and dropped."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; the tensors handed out must not be used afterwards."""


class FeatureGuest(ABC):
    """The draft's half."""

    @abstractmethod
    def read_rows(self, slot: int, sequence: int, start: int, stop: int) -> Rows:
        """Copy what is still whole of positions ``start .. stop-1``; may be empty.

        The result ends at `stop`, or is empty; it starts later than `start` where older rows may
        have been overwritten. Raises FeatureExpired when the slot belongs to another sequence.
        """

    @abstractmethod
    def weights(self) -> Mapping[str, Tensor]:
        """The target's shared tensors, read-only: `embed` [V, H]; `head` [V, H] or `head_t`."""

    @abstractmethod
    def mapped_bytes(self) -> int:
        """Bytes that are shared with the target."""

    @abstractmethod
    def close(self) -> None:
        """Unmap; the tensors handed out must not be used afterwards."""


class FeatureTransport(ABC):
    """One way of sharing features; `name` is what status and results show."""

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def host(cls, run_dir: Path) -> FeatureHost:
        """The half that the target daemon runs."""

    @classmethod
    @abstractmethod
    def attach(
        cls, address: str, *, nonce: int, life: int, shape: RingShape, timeout: float
    ) -> FeatureGuest:
        """Map what the host at `address` offers, or raise TransportRefused/DeadlineExceeded."""
