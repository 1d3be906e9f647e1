"""``local``: both halves in one process, over plain tensors; never chosen for two daemons.

For `launch.inprocess` and for tests of the engines. An offer is found by its address within this
process; there is nothing to serve, and nothing stops the guest from writing.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Final

import torch
from torch import Tensor

from protocol.config import RING_SOCKET
from protocol.errors import InternalError, StaleMessage, TransportRefused
from protocol.feature_ring import RingShape
from protocol.transports.base import (
    CPU,
    NO_OWNER,
    FeatureGuest,
    FeatureHost,
    FeatureTransport,
    HandOver,
    RingView,
    Rows,
    WeightSpec,
    check_cpu,
    read_whole,
)

_OFFERS: Final[dict[str, "LocalHost"]] = {}


class LocalHost(FeatureHost):
    """The target's half; holds one descriptor, which is never readable, once it has offered."""

    def __init__(self, run_dir: Path) -> None:
        self._address = str(run_dir / RING_SOCKET)
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
        other = _OFFERS.setdefault(self._address, self)
        if other is not self:
            raise TransportRefused(f"another target offers at {self._address}; end it first")
        self.offered = (nonce, life)
        if self._never is None:
            self._never = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        if self._never is None:
            raise InternalError("the ring has not been offered")
        return self._never

    def serve(self) -> None:
        """Guests attach without help."""

    def close(self) -> None:
        if self._never is not None:
            os.close(self._never)
            self._never = None
            del _OFFERS[self._address]
        self.ring = None
        self.shared = {}


class LocalGuest(FeatureGuest):
    """The draft's half."""

    def __init__(self, view: RingView, weights: Mapping[str, Tensor]) -> None:
        self._view: RingView | None = view
        self._weights = dict(weights)

    def read_rows(self, slot: int, sequence: int, start: int, stop: int) -> Rows:
        if self._view is None:
            raise InternalError("the ring has been detached")
        return read_whole(self._view, slot, sequence, start, stop)

    def weights(self) -> Mapping[str, Tensor]:
        return self._weights

    def mapped_bytes(self) -> int:
        tensors = list(self._weights.values())
        if self._view is not None:
            tensors += [self._view.owner, self._view.written_high, self._view.rows]
        return sum(tensor.nbytes for tensor in tensors)

    def close(self) -> None:
        self._view = None
        self._weights = {}


class Local(FeatureTransport):
    """Target and draft are objects of one process."""

    name: ClassVar[str] = "local"

    @classmethod
    def host(
        cls, run_dir: Path, device: str = CPU, hand_over: HandOver = "synchronise"
    ) -> FeatureHost:
        del hand_over  # a CPU's rows are there when the reply is sent
        check_cpu(cls.name, device)
        return LocalHost(run_dir)

    @classmethod
    def attach(
        cls,
        address: str,
        *,
        nonce: int,
        life: int,
        shape: RingShape,
        timeout: float,
        device: str = CPU,
    ) -> FeatureGuest:
        del timeout, device  # nothing to wait for; the reader moves its copies itself
        host = _OFFERS.get(address)
        if host is None or host.ring is None:
            raise TransportRefused(f"no target of this process offers a ring at {address}")
        if (nonce, life) != host.offered:
            raise StaleMessage(f"life {life} was asked for; this is life {host.offered[1]}")
        have, want = host.ring.shape, shape
        if _measures(have) != _measures(want):
            raise TransportRefused(f"ring: expected {_measures(want)}, found {_measures(have)}")
        return LocalGuest(host.ring, host.shared)


def _measures(shape: RingShape) -> tuple[int, int, int, str]:
    return (shape.slots, shape.capacity, shape.row_width, shape.dtype)


TRANSPORT: Final[type[FeatureTransport]] = Local
