"""`CudaRuntime` over ``cupy.cuda.runtime``; imported only when a GPU is asked for.

Every name used here exists in cupy 14; none of it has run on a GPU yet (docs/gpu.md).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import cupy
import torch
from cupy.cuda import runtime as cuda
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from protocol.transports.cuda_runtime import CudaError, DeviceInfo

IPC_EVENT_SUPPORTED: Final = 125  # CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED
LAZY_PEER_ACCESS: Final = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag there is
PORTABLE: Final = 1  # cudaHostRegisterPortable
NOT_READY: Final = "cudaErrorNotReady"


@contextmanager
def _named(doing: str) -> Iterator[None]:
    try:
        yield
    except cuda.CUDARuntimeError as error:
        raise CudaError(str(error).partition(":")[0], doing) from error


class CupyRuntime:
    """Stateless but for CUDA's own state; the current device is the calling thread's."""

    def devices(self) -> tuple[DeviceInfo, ...]:
        with _named("counting GPUs"):
            return tuple(_info(index) for index in range(cuda.getDeviceCount()))

    def driver_version(self) -> str:
        with _named("reading the driver's version"):
            number = int(cuda.driverGetVersion())
        return f"{number // 1000}.{number % 1000 // 10}"

    def free_bytes(self) -> int:
        with _named("reading free memory"):
            return int(cuda.memGetInfo()[0])

    def set_device(self, index: int) -> None:
        with _named(f"setting device {index}"):
            cuda.setDevice(index)
            torch.cuda.set_device(index)

    def can_access_peer(self, index: int, other: int) -> bool:
        with _named(f"asking whether {index} reads {other}"):
            return bool(cuda.deviceCanAccessPeer(index, other))

    def malloc(self, size: int) -> int:
        with _named(f"cudaMalloc of {size} bytes"):
            pointer = int(cuda.malloc(size))
            cuda.memset(pointer, 0, size)
        return pointer

    def free(self, pointer: int) -> None:
        with _named("cudaFree"):
            cuda.free(pointer)

    def export_memory(self, pointer: int) -> bytes:
        with _named("cudaIpcGetMemHandle"):
            return bytes(cuda.ipcGetMemHandle(pointer))

    def open_memory(self, handle: bytes) -> int:
        with _named("cudaIpcOpenMemHandle"):
            return int(cuda.ipcOpenMemHandle(handle, LAZY_PEER_ACCESS))

    def close_memory(self, pointer: int) -> None:
        with _named("cudaIpcCloseMemHandle"):
            cuda.ipcCloseMemHandle(pointer)

    def create_event(self, *, shared: bool) -> int:
        flags = cuda.eventDisableTiming | (cuda.eventInterprocess if shared else 0)
        with _named("cudaEventCreateWithFlags"):
            return int(cuda.eventCreateWithFlags(flags))

    def destroy_event(self, event: int) -> None:
        with _named("cudaEventDestroy"):
            cuda.eventDestroy(event)

    def export_event(self, event: int) -> bytes:
        with _named("cudaIpcGetEventHandle"):
            return bytes(cuda.ipcGetEventHandle(event))

    def open_event(self, handle: bytes) -> int:
        with _named("cudaIpcOpenEventHandle"):
            return int(cuda.ipcOpenEventHandle(handle))

    def record_event(self, event: int) -> None:
        with _named("cudaEventRecord"):
            cuda.eventRecord(event, _stream())

    def is_complete(self, event: int) -> bool:
        try:
            with _named("cudaEventQuery"):
                status = cuda.eventQuery(event)  # some versions return the status, some raise it
        except CudaError as error:
            if error.name == NOT_READY:
                return False
            raise
        return not status

    def copy_async(self, destination: int, source: int, size: int) -> None:
        with _named(f"cudaMemcpyAsync of {size} bytes"):
            cuda.memcpyAsync(destination, source, size, cuda.memcpyDefault, _stream())

    def register_host(self, pointer: int, size: int) -> None:
        with _named(f"cudaHostRegister of {size} bytes"):
            cuda.hostRegister(pointer, size, PORTABLE)

    def unregister_host(self, pointer: int) -> None:
        with _named("cudaHostUnregister"):
            cuda.hostUnregister(pointer)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=f"cuda:{cuda.getDevice()}")

    def view(self, pointer: int, size: int) -> Tensor:
        memory = cupy.cuda.UnownedMemory(pointer, size, None, cuda.getDevice())
        flat = cupy.ndarray((size,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
        tensor: Tensor = from_dlpack(flat)
        return tensor


def _info(index: int) -> DeviceInfo:
    found = cuda.getDeviceProperties(index)
    name = found["name"].decode(errors="replace")
    mig = " MIG " in f" {name} "
    digits = bytes(found["uuid"]).hex()
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return DeviceInfo(
        index=index,
        uuid=f"{'MIG' if mig else 'GPU'}-{'-'.join(parts)}",
        name=name,
        mig=mig,
        ipc_events=bool(cuda.deviceGetAttribute(IPC_EVENT_SUPPORTED, index)),
        total_bytes=int(found["totalGlobalMem"]),
        capability=(int(found["major"]), int(found["minor"])),
    )


def _stream() -> int:
    """The stream that torch submits to: copies and records stand in its order."""
    return int(torch.cuda.current_stream().cuda_stream)
