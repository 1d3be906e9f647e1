"""Ring and weights in memory of this process alone, for the transports that map nothing."""

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from protocol.errors import InternalError
from protocol.feature_ring import RingShape
from protocol.transports.base import NO_OWNER, FeatureHost, RingView, WeightSpec


class PlainHost(FeatureHost):
    """Allocates; holds one descriptor, which is never readable, once it has offered."""

    def __init__(self) -> None:
        self._never: int | None = None
        self.ring: RingView | None = None
        self.shared: dict[str, Tensor] = {}
        self.offered = (-1, -1)

    def create_ring(self, shape: RingShape) -> RingView:
        if self.ring is not None:
            raise InternalError("the ring is allocated twice")
        dtype = getattr(torch, shape.dtype)
        self.ring = RingView(
            shape=shape,
            owner=torch.full((shape.slots,), NO_OWNER, dtype=torch.int64),
            written_high=torch.zeros(shape.slots, dtype=torch.int64),
            rows=torch.zeros(shape.slots, shape.capacity, shape.row_width, dtype=dtype),
        )
        return self.ring

    def create_weights(self, specs: Mapping[str, WeightSpec]) -> dict[str, Tensor]:
        if self.shared.keys() & specs.keys():
            raise InternalError(f"weights are allocated twice: {sorted(specs)}")
        created = {
            name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
            for name, spec in specs.items()
        }
        self.shared |= created
        return created

    def offer(self, nonce: int, life: int) -> None:
        self.offered = (nonce, life)
        if self._never is None:
            self._never = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        if self._never is None:
            raise InternalError("the ring has not been offered")
        return self._never

    def serve(self) -> None:
        """There is nobody to answer here."""

    def close(self) -> None:
        if self._never is not None:
            os.close(self._never)
            self._never = None
        self.ring = None
        self.shared = {}


def measures(shape: RingShape) -> tuple[int, int, int, str]:
    """What two rings must have in common; how a capacity splits is the target's business."""
    return (shape.slots, shape.capacity, shape.row_width, shape.dtype)
