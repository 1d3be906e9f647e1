"""Allocations on a GPU as tensors: the exporter's own, and those that an importer has opened."""

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from protocol import arena_layout, ring_socket
from protocol.arena_layout import Ask, DeviceArena, Layout, Place, Probed, Refusal
from protocol.config import Deadlines
from protocol.errors import DeviceLost, InternalError, TransportRefused, from_wire
from protocol.transports.cuda_runtime import (
    CudaError,
    CudaRuntime,
    DeviceInfo,
    explain,
    wait_for,
)
from protocol.transports.mapped import DTYPES

log = logging.getLogger(__name__)

Wanted = Mapping[str, tuple[str, tuple[int, ...]]]
EVENTS: Final = 8
GONE: Final = "the target that owns the mapped memory is gone; it must not be touched again"


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that a layout names; TransportRefused for one that no arena holds."""
    if name not in DTYPES:
        raise TransportRefused(f"dtype {name}; expected one of {', '.join(DTYPES)}")
    return DTYPES[name]


def cut(
    runtime: CudaRuntime, pointer: int, size: int, places: Sequence[Place]
) -> dict[str, Tensor]:
    """Views of `size` bytes at `pointer`, by name; the places must have been checked."""
    flat = runtime.view(pointer, size)
    tensors: dict[str, Tensor] = {}
    for place in places:
        dtype = torch_dtype(place.dtype)
        if place.size == 0:
            tensors[place.name] = runtime.empty(place.shape, dtype)
            continue
        part = flat[place.offset : place.offset + place.size]
        tensors[place.name] = part.view(dtype).view(place.shape)
    return tensors


class Arena:
    """One ``cudaMalloc`` allocation of this process, on its current device, zeroed."""

    def __init__(self, runtime: CudaRuntime, wanted: Wanted) -> None:
        self._runtime = runtime
        self._places, self.size = arena_layout.arrange(wanted, 0)
        self._pointer = runtime.malloc(self.size)
        self.tensors = cut(runtime, self._pointer, self.size, self._places)

    def exported(self) -> DeviceArena:
        """What an importer needs to open it."""
        return DeviceArena(
            handle=self._runtime.export_memory(self._pointer),
            size=self.size,
            places=tuple(self._places),
        )

    def free(self) -> None:
        """End the allocation; its tensors must not be used afterwards."""
        self.tensors = {}
        self._runtime.free(self._pointer)


class EventRing:
    """Events that are recorded in turn, so that a later record cannot hide an earlier one."""

    def __init__(self, runtime: CudaRuntime, *, shared: bool) -> None:
        self._runtime = runtime
        self._shared = shared
        self._events = [runtime.create_event(shared=shared) for _ in range(EVENTS)]

    def record(self, number: int) -> None:
        """Record the event of hand-over `number`; unless importers can wait for it, wait here."""
        event = self._events[number % EVENTS]
        self._runtime.record_event(event)
        if not self._shared:
            wait_for(self._runtime, event, Deadlines().ring_copy, "the forward's feature rows")

    def exported(self) -> tuple[bytes, ...]:
        """Handles for importers; none where they need not wait."""
        runtime = self._runtime
        return tuple(runtime.export_event(each) for each in self._events) if self._shared else ()

    def destroy(self) -> None:
        """No importer may have one open."""
        for event in self._events:
            self._runtime.destroy_event(event)


class Imports:
    """What a draft has opened of its target's, and the lease that it holds for it.

    Opening and closing balance, in reverse order; the lease ends last, so that the target frees
    nothing that is still mapped.
    """

    def __init__(self, runtime: CudaRuntime, lease: socket.socket, address: str) -> None:
        self._runtime = runtime
        self._address = address
        self._lease: socket.socket | None = lease
        self._device = -1
        self._closers: list[tuple[Callable[[int], None], int]] = []
        self.tensors: dict[str, Tensor] = {}
        self.events: list[int] = []
        self.done = 0  # a private event: this process's own copies

    def ask(self, ask: Ask, timeout: float) -> tuple[Layout, list[int]]:
        """Fetch the layout and its descriptors; the connection is the lease from then on."""
        if self._lease is None:
            raise InternalError("the target's memory has been let go")
        answer, descriptors = ring_socket.ask_over(self._lease, self._address, ask, timeout)
        if isinstance(answer, Refusal):
            raise from_wire(answer.code, answer.detail)
        return answer, descriptors

    def open(self, answer: Layout, device: DeviceInfo) -> None:
        """Map every arena into `device`'s context and open the events; raises CudaError."""
        runtime = self._runtime
        check_reach(runtime, answer.uuid, device)
        self._device = device.index
        runtime.set_device(device.index)
        for arena in answer.devices:
            pointer = runtime.open_memory(arena.handle)
            self._closers.append((runtime.close_memory, pointer))
            start, size = pointer + arena.offset, arena.size - arena.offset
            self.tensors |= cut(runtime, start, size, arena.places)
        for handle in answer.events:
            event = runtime.open_event(handle)
            self._closers.append((runtime.destroy_event, event))
            self.events.append(event)
        self.done = runtime.create_event(shared=False)
        self._closers.append((runtime.destroy_event, self.done))

    def confirm(self, probed: Probed) -> None:
        """Have the exporter look at what was written; raises what it finds wrong."""
        if self._lease is not None:
            ring_socket.confirm(self._lease, self._address, probed)

    def copy_over(self, but: set[str]) -> None:
        """Replace mapped tensors by copies on this process's own device, made once."""
        runtime, mapped = self._runtime, self.tensors
        for name in mapped.keys() - but:
            copy = runtime.empty(tuple(mapped[name].shape), mapped[name].dtype)
            runtime.copy_async(copy.data_ptr(), mapped[name].data_ptr(), copy.nbytes)
            mapped[name] = copy
        runtime.record_event(self.done)
        wait_for(runtime, self.done, Deadlines().pair, "the copy of embedding and head")

    def check_owner(self) -> None:
        """Raise DeviceLost once the exporter has ended: its memory is poison from then on."""
        if self._lease is None or ring_socket.has_ended(self._lease):
            raise DeviceLost(GONE)

    def close(self) -> None:
        """Let go of everything; what CUDA says against it is logged, since nothing else can be."""
        self.tensors, self.events = {}, []
        closers, self._closers = self._closers, []
        try:
            if closers:
                self._runtime.set_device(self._device)
            for close, number in reversed(closers):
                close(number)
        except CudaError as error:
            log.warning("letting go of the target's memory: %s", explain(error))
        if self._lease is not None:
            self._lease.close()
            self._lease = None


def check_reach(runtime: CudaRuntime, uuid: str, device: DeviceInfo) -> None:
    """Raise TransportRefused where `device` cannot read memory of the GPU named `uuid`.

    A GPU that this process does not see may be reachable all the same; then the probe decides.
    """
    if uuid == device.uuid:
        return  # CUDA denies that a device is its own peer, and needs no access for it
    if device.mig or uuid.startswith("MIG-"):
        raise TransportRefused(
            f"cuda-ipc: {uuid} and {device.uuid} are different MIG instances or GPUs, which share "
            "no memory; put both daemons on one instance, or the draft on the CPU"
        )
    others = [each for each in runtime.devices() if each.uuid == uuid]
    if others and not runtime.can_access_peer(device.index, others[0].index):
        raise TransportRefused(
            f"cuda-ipc: {device.uuid} cannot read the memory of {uuid} (no peer access); put both "
            "daemons on one GPU, or the draft on the CPU"
        )
