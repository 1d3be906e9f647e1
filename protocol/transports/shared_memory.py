"""``shm``: the ring and the shared weights in sealed memory that the target hands to the draft.

The host listens on ``ring.sock`` in the run directory. A guest states nonce and life and gets the
layout with one descriptor per arena; it maps them read-only. A new life of the target has new
memory, so that a new life means a new fetch.
"""

import ctypes
import mmap
import os
import select
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
import torch
from torch import Tensor

from protocol import arena_layout, ring_socket, sealed_memory
from protocol.arena_layout import Ask, Layout, Place, Refusal
from protocol.config import RING_SOCKET
from protocol.errors import (
    DaemonError,
    InternalError,
    StaleMessage,
    TransportRefused,
    from_wire,
)
from protocol.feature_ring import RingShape
from protocol.transports.base import (
    NO_OWNER,
    FeatureGuest,
    FeatureHost,
    FeatureTransport,
    RingView,
    Rows,
    WeightSpec,
    read_whole,
)

MAX_WAITING: Final = 8  # connections that have not stated nonce and life yet
DTYPES: Final[Mapping[str, torch.dtype]] = {
    "int64": torch.int64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def view_tensors(mapping: mmap.mmap, places: Sequence[Place]) -> dict[str, Tensor]:
    """Make tensors over `mapping`, which lives until the last of them and their views is gone.

    The only place where a mapping becomes tensors. Each storage keeps a ctypes array that keeps
    the NumPy array that holds the mapping's buffer, so the mapping cannot be closed under a
    tensor: ``mapping.close()`` would raise BufferError. ctypes because `torch.frombuffer` warns on
    read-only buffers; a store into such a tensor ends the process, as it should be unthinkable.
    """
    buffer = np.frombuffer(mapping, dtype=np.uint8)
    tensors: dict[str, Tensor] = {}
    for place in places:
        dtype = DTYPES[place.dtype]
        if place.size == 0:
            tensors[place.name] = torch.empty(place.shape, dtype=dtype)
            continue
        raw = (ctypes.c_char * place.size).from_address(buffer.ctypes.data + place.offset)
        raw.keeps = buffer  # type: ignore[attr-defined]  # ctypes objects take attributes
        flat = torch.frombuffer(raw, dtype=dtype, count=prod(place.shape))
        tensors[place.name] = flat.view(place.shape)
    return tensors


class SharedMemoryHost(FeatureHost):
    """The target's half."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / RING_SOCKET
        self._arenas: list[tuple[int, int]] = []  # descriptor, bytes
        self._places: list[Place] = []
        self._listener: socket.socket | None = None
        self._waiting: dict[int, socket.socket] = {}
        self._poller: select.epoll | None = None
        self._offered = (-1, -1)

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
        if self._listener is not None or taken:
            raise InternalError(f"{label}: allocated twice ({sorted(taken)}), or after the offer")
        if len(self._arenas) == arena_layout.MAX_ARENAS:
            raise InternalError(f"{label}: {arena_layout.MAX_ARENAS} arenas are the most")
        places, size = arena_layout.arrange(wanted, len(self._arenas))
        fd, mapping = sealed_memory.create(label, size)
        self._arenas.append((fd, size))
        self._places.extend(places)
        return view_tensors(mapping, places)

    def offer(self, nonce: int, life: int) -> None:
        self._offered = (nonce, life)
        if self._listener is not None:
            return
        self._listener = ring_socket.listen(self._path, MAX_WAITING)
        self._poller = select.epoll()
        self._poller.register(self._listener, select.EPOLLIN)

    def fileno(self) -> int:
        if self._poller is None:
            raise InternalError("the ring has not been offered")
        return self._poller.fileno()

    def serve(self) -> None:
        if self._poller is None or self._listener is None:
            return
        for fd, _ in self._poller.poll(0):
            if fd == self._listener.fileno():
                self._accept(self._listener)
            elif fd in self._waiting:
                self._answer(self._waiting[fd])
                self._drop(fd)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # the guest has gone again, or descriptors are short
            return
        connection.setblocking(False)
        if len(self._waiting) == MAX_WAITING:  # a silent one must not lock the others out
            self._drop(next(iter(self._waiting)))
        self._waiting[connection.fileno()] = connection
        if self._poller is not None:
            self._poller.register(connection, select.EPOLLIN)

    def _drop(self, fd: int) -> None:
        self._waiting.pop(fd).close()  # closing takes it out of the poller

    def _answer(self, connection: socket.socket) -> None:
        descriptors: list[int] = []
        answer: Layout | Refusal
        with suppress(OSError):  # a guest that is gone needs no answer
            try:
                # Read before anything is refused: closing with the question unread would reset
                # the connection, and the refusal would be lost.
                question = connection.recv(arena_layout.MAX_ASK_BYTES)
                ring_socket.check_peer(connection)
                self._check(arena_layout.decode_ask(question))
                sizes = tuple(size for _, size in self._arenas)
                answer = Layout(arenas=sizes, places=tuple(self._places))
                descriptors = [fd for fd, _ in self._arenas]
            except DaemonError as error:
                answer = Refusal(code=error.code, detail=str(error))
            socket.send_fds(connection, [arena_layout.encode(answer)], descriptors)

    def _check(self, ask: Ask) -> None:
        if (ask.nonce, ask.life) != self._offered:
            raise StaleMessage(
                f"life {ask.life} of the target was asked for, or its nonce is another; "
                f"this is life {self._offered[1]}"
            )

    def close(self) -> None:
        for fd in list(self._waiting):
            self._drop(fd)
        if self._poller is not None:
            self._poller.close()
            self._poller = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)
        while self._arenas:
            os.close(self._arenas.pop()[0])
        self._places.clear()


class SharedMemoryGuest(FeatureGuest):
    """The draft's half: read-only mappings; they end when the last tensor over them does."""

    def __init__(self, view: RingView, weights: Mapping[str, Tensor], mapped: int) -> None:
        self._view: RingView | None = view
        self._weights = dict(weights)
        self._mapped = mapped

    def read_rows(self, slot: int, sequence: int, start: int, stop: int) -> Rows:
        if self._view is None:
            raise InternalError("the ring has been unmapped")
        return read_whole(self._view, slot, sequence, start, stop)

    def weights(self) -> Mapping[str, Tensor]:
        return self._weights

    def mapped_bytes(self) -> int:
        return self._mapped

    def close(self) -> None:
        self._view = None
        self._weights = {}
        self._mapped = 0


def _map(answer: Layout, descriptors: Sequence[int], shape: RingShape) -> SharedMemoryGuest:
    if len(descriptors) != len(answer.arenas):
        raise TransportRefused(
            f"{len(answer.arenas)} arenas were announced, {len(descriptors)} descriptors came"
        )
    arena_layout.check_places(answer, shape)
    tensors: dict[str, Tensor] = {}
    for number, (fd, size) in enumerate(zip(descriptors, answer.arenas, strict=True)):
        mapping = sealed_memory.open_sealed(fd, size)
        inside = [place for place in answer.places if place.arena == number]
        tensors |= view_tensors(mapping, inside)
    owner, high, rows = (tensors.pop(name) for name in arena_layout.ring_tensors(shape))
    view = RingView(shape=shape, owner=owner, written_high=high, rows=rows)
    return SharedMemoryGuest(view, tensors, sum(answer.arenas))


class SharedMemory(FeatureTransport):
    """One machine, memory of the CPU; the namespaces may differ if both see the run directory."""

    name: ClassVar[str] = "shm"

    @classmethod
    def host(cls, run_dir: Path) -> FeatureHost:
        return SharedMemoryHost(run_dir)

    @classmethod
    def attach(
        cls, address: str, *, nonce: int, life: int, shape: RingShape, timeout: float
    ) -> FeatureGuest:
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
