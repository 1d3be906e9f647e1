"""``shm``: the ring and the shared weights in sealed memory that the target hands to the draft.

The host listens on ``ring.sock`` in the run directory. A guest states nonce and life and gets the
layout with one descriptor per arena; it maps them read-only. A new life of the target has new
memory, so that a new life means a new fetch.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final

from torch import Tensor

from protocol import arena_layout, ring_socket, sealed_memory
from protocol.arena_layout import Ask, Layout, Place, Refusal
from protocol.config import RING_SOCKET, HandOver
from protocol.errors import InternalError, from_wire
from protocol.feature_ring import RingShape
from protocol.gpu import CPU
from protocol.ring_server import Offer, RingServer
from protocol.transports.base import (
    NO_OWNER,
    FeatureGuest,
    FeatureHost,
    FeatureTransport,
    RingView,
    WeightSpec,
    check_cpu,
)
from protocol.transports.mapped import map_arenas, view_tensors
from protocol.transports.view_guest import ViewGuest


class SharedMemoryHost(FeatureHost):
    """The target's half."""

    def __init__(self, run_dir: Path) -> None:
        self._arenas: list[tuple[int, int]] = []  # descriptor, bytes
        self._places: list[Place] = []
        self._server = RingServer(run_dir / RING_SOCKET, self._layout)

    def create_ring(self, shape: RingShape) -> RingView:
        tensors = self._allocate("dflash-ring", arena_layout.ring_tensors(shape))
        owner, high, rows = tensors.values()
        owner.fill_(NO_OWNER)
        return RingView(shape=shape, owner=owner, written_high=high, rows=rows)

    def create_weights(self, specs: Mapping[str, WeightSpec]) -> dict[str, Tensor]:
        wanted = {name: (spec.dtype, spec.shape) for name, spec in specs.items()}
        return self._allocate("dflash-weights", wanted)

    def _allocate(
        self, label: str, wanted: Mapping[str, tuple[str, tuple[int, ...]]]
    ) -> dict[str, Tensor]:
        if not wanted:
            return {}
        taken = {place.name for place in self._places} & wanted.keys()
        if self._server.is_open or taken:
            raise InternalError(f"{label}: allocated twice ({sorted(taken)}), or after the offer")
        if len(self._arenas) == arena_layout.MAX_ARENAS:
            raise InternalError(f"{label}: {arena_layout.MAX_ARENAS} arenas are the most")
        places, size = arena_layout.arrange(wanted, len(self._arenas))
        fd, mapping = sealed_memory.create(label, size)
        self._arenas.append((fd, size))
        self._places.extend(places)
        return view_tensors(mapping, places)

    def offer(self, nonce: int, life: int) -> None:
        self._server.offer(nonce, life)

    def fileno(self) -> int:
        return self._server.fileno()

    def serve(self) -> None:
        self._server.serve()

    def _layout(self) -> Offer:
        sizes = tuple(size for _, size in self._arenas)
        layout = Layout(arenas=sizes, places=tuple(self._places))
        return layout, [fd for fd, _ in self._arenas]

    def close(self) -> None:
        self._server.close()
        while self._arenas:
            os.close(self._arenas.pop()[0])
        self._places.clear()


def _map(answer: Layout, descriptors: Sequence[int], shape: RingShape) -> ViewGuest:
    arena_layout.check_places(answer, shape)
    tensors = map_arenas(answer, descriptors)
    owner, high, rows = (tensors.pop(name) for name in arena_layout.ring_tensors(shape))
    view = RingView(shape=shape, owner=owner, written_high=high, rows=rows)
    return ViewGuest(view, tensors, sum(answer.arenas))


class SharedMemory(FeatureTransport):
    """One machine, memory of the CPU; the namespaces may differ if both see the run directory."""

    name: ClassVar[str] = "shm"

    @classmethod
    def host(
        cls, run_dir: Path, device: str = CPU, hand_over: HandOver = "synchronise"
    ) -> FeatureHost:
        del hand_over  # a CPU's rows are there when the reply is sent
        check_cpu(cls.name, device)
        return SharedMemoryHost(run_dir)

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
        del device  # the reader moves its copies itself
        ask = Ask(nonce=nonce, life=life)
        answer, descriptors = ring_socket.fetch(address, ask, timeout)
        try:
            if isinstance(answer, Refusal):
                raise from_wire(answer.code, answer.detail)
            return _map(answer, descriptors, shape)
        finally:
            for fd in descriptors:
                os.close(fd)


TRANSPORT: Final[type[FeatureTransport]] = SharedMemory
