"""The few CUDA calls that sharing memory needs, as one interface; nothing of CUDA is imported.

`protocol.transports.cupy_runtime` is the real one. Tests drive the transports with a fake that
enforces CUDA's rules. Pointers, events and streams are whole numbers, as CUDA's own API has them;
every call can raise `CudaError`.
"""

import importlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from protocol.errors import (
    DeadlineExceeded,
    DeviceAbsent,
    DeviceLost,
    TransportRefused,
    Unavailable,
)

PREFIX: Final = "cuda:"
SPIN_SECONDS: Final = 0.0005  # a hand-over is mostly done by then, and sleeping costs more
NAP_SECONDS: Final = 0.0001


class CudaError(Exception):
    """A CUDA call failed; `name` is CUDA's own name of the error."""

    def __init__(self, name: str, doing: str) -> None:
        super().__init__(f"{doing}: {name}")
        self.name = name


@dataclass(frozen=True)
class DeviceInfo:
    """One GPU that this process sees, under the number by which this process knows it."""

    index: int
    uuid: str  # "GPU-..." or "MIG-...": the same in every process
    name: str
    mig: bool
    ipc_events: bool
    total_bytes: int
    capability: tuple[int, int]


class CudaRuntime(Protocol):
    """What the transports and the facts ask of CUDA. One GPU thread per process."""

    def devices(self) -> tuple[DeviceInfo, ...]:
        """Every GPU that this process sees; CudaError where there is none, or no driver."""
        ...

    def driver_version(self) -> str:
        """The CUDA version of the driver, as "13.0"."""
        ...

    def free_bytes(self) -> int:
        """Memory of the current device that can still be had."""
        ...

    def set_device(self, index: int) -> None:
        """Make `index` this thread's current device; before any of the calls below."""
        ...

    def can_access_peer(self, index: int, other: int) -> bool:
        """Whether `index` can read the memory of another device that this process sees."""
        ...

    def malloc(self, size: int) -> int:
        """An allocation of its own (never a pool's), zeroed; its pointer is its base."""
        ...

    def free(self, pointer: int) -> None:
        """End it; no importer may have it open."""
        ...

    def export_memory(self, pointer: int) -> bytes:
        """The 64-byte handle of the allocation whose base `pointer` is."""
        ...

    def open_memory(self, handle: bytes) -> int:
        """Map another process's allocation into the current device; returns its base."""
        ...

    def close_memory(self, pointer: int) -> None:
        """Unmap what `open_memory` returned."""
        ...

    def create_event(self, *, shared: bool) -> int:
        """An event without timing; one that is `shared` can be exported."""
        ...

    def destroy_event(self, event: int) -> None:
        """End an event, created or opened."""
        ...

    def export_event(self, event: int) -> bytes:
        """The 64-byte handle of a shared event."""
        ...

    def open_event(self, handle: bytes) -> int:
        """Another process's event."""
        ...

    def record_event(self, event: int) -> None:
        """Have `event` complete when everything submitted to the stream so far has."""
        ...

    def is_complete(self, event: int) -> bool:
        """Whether what was recorded last has happened; never blocks."""
        ...

    def copy_async(self, destination: int, source: int, size: int) -> None:
        """Copy between any two places, devices or registered host memory, in stream order."""
        ...

    def register_host(self, pointer: int, size: int) -> None:
        """Pin host memory, so that copies to it are asynchronous."""
        ...

    def unregister_host(self, pointer: int) -> None:
        """Unpin it."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A private, uninitialised tensor on the current device, from torch's own allocator."""
        ...

    def view(self, pointer: int, size: int) -> Tensor:
        """Bytes [size] uint8 at `pointer`, on the current device; no copy, and no ownership."""
        ...


# CUDA's name of an error: what it means where memory is shared, and what to do.
MEANINGS: Final[Mapping[str, str]] = {
    "cudaErrorNoDevice": "this process sees no GPU (CUDA_VISIBLE_DEVICES hides all, or there is "
    "none)",
    "cudaErrorInsufficientDriver": "the NVIDIA driver is missing, or older than this CUDA; install "
    "or update it, or use the extra that fits it (cuda12, cuda13)",
    "cudaErrorInvalidValue": "the memory has no legacy IPC handle: it is not a cudaMalloc "
    "allocation (expandable_segments and async pools are not), or this CUDA has none",
    "cudaErrorInvalidContext": "the exporting process cannot be seen from here; share its pid "
    "namespace (--pid=container:TARGET)",
    "cudaErrorInvalidResourceHandle": "the handle is of this very process, or its owner is gone",
    "cudaErrorMapBufferObjectFailed": "the driver could not map it; share the ipc and pid "
    "namespaces and make the same GPUs visible to both",
    "cudaErrorPeerAccessUnsupported": "these two GPUs cannot read each other's memory; put both "
    "daemons on one GPU, or the draft on the CPU",
    "cudaErrorNotSupported": "this platform has no CUDA IPC (WSL2, a vGPU or an integrated GPU); "
    "put the draft on the CPU",
    "cudaErrorMemoryAllocation": "the GPU has no memory left for it",
}


def explain(error: CudaError) -> str:
    """The error as a sentence with its remedy, where one is known."""
    meaning = MEANINGS.get(error.name)
    return f"{error} ({meaning})" if meaning else str(error)


@contextmanager
def refusing() -> Iterator[None]:
    """While memory is set up: what CUDA refuses is TransportRefused, with reason and remedy."""
    try:
        yield
    except CudaError as error:
        raise TransportRefused(f"cuda-ipc: {explain(error)}") from error


@contextmanager
def losing() -> Iterator[None]:
    """While rounds run: a CUDA error stays with the process's context, so the daemon is lost."""
    try:
        yield
    except CudaError as error:
        raise DeviceLost(explain(error)) from error


def load_runtime() -> CudaRuntime:
    """The real runtime; Unavailable where cupy is not installed."""
    try:
        module = importlib.import_module("protocol.transports.cupy_runtime")
    except ModuleNotFoundError as error:
        raise Unavailable(
            f"{error.name} is not installed; GPUs need the extra cuda12 or cuda13: "
            "pip install 'dflash-daemons[cuda13]'"
        ) from error
    runtime: CudaRuntime = module.CupyRuntime()
    return runtime


def find_device(runtime: CudaRuntime, wanted: str) -> DeviceInfo:
    """The GPU that `wanted` names: ``cuda:N``, as this process counts, or ``cuda:<uuid>``.

    Raises DeviceAbsent, with the GPUs that there are. Never another device than the one asked for.
    """
    try:
        devices = runtime.devices()
    except CudaError as error:
        raise DeviceAbsent(f"no CUDA device: {wanted} was asked for; {explain(error)}") from error
    name = wanted.removeprefix(PREFIX)
    for device in devices:
        if name in (str(device.index), device.uuid):
            return device
    have = ", ".join(f"cuda:{each.index} ({each.uuid}, {each.name})" for each in devices)
    raise DeviceAbsent(f"no CUDA device {wanted}; this process sees {have or 'none'}")


def wait_for(runtime: CudaRuntime, event: int, seconds: float, what: str) -> None:
    """Poll `event` from the host; DeadlineExceeded where it is not complete after `seconds`.

    A stream that waited for it instead would wait for ever if its owner died.
    """
    began = time.monotonic()
    while not runtime.is_complete(event):
        waited = time.monotonic() - began
        if waited > seconds:
            raise DeadlineExceeded(f"{what}: not complete after {seconds:g} s")
        if waited > SPIN_SECONDS:
            time.sleep(NAP_SECONDS)
