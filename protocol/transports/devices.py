"""The device that a daemon computes on: opened once at its start, with the facts for `Hello`."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from protocol import gpu
from protocol.errors import ConfigError, DeviceAbsent
from protocol.memory import Available, available
from protocol.messages import GpuFacts
from protocol.transports.cuda_runtime import (
    CudaError,
    CudaRuntime,
    DeviceInfo,
    explain,
    find_device,
    load_runtime,
)

PROBE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Device:
    """Where tensors are made, and what peers are told of it."""

    torch: torch.device
    name: str  # "cpu", or "cuda:<uuid>": the same in every process
    facts: GpuFacts | None = None
    free_bytes: int | None = None  # of a GPU, when it was opened

    def available(self) -> Available:
        """Memory that this process may still take there."""
        if self.free_bytes is None:
            return available()
        return Available(self.free_bytes, f"free memory of {self.name}")


HOST = Device(torch.device(gpu.CPU), gpu.CPU)


def open_device(wanted: str, load: Callable[[], CudaRuntime] = load_runtime) -> Device:
    """Make `wanted` this process's device: ``cpu``, ``cuda:N`` or ``cuda:<uuid>``.

    Raises DeviceAbsent where it is not there, ConfigError where this torch knows no GPU, and
    Unavailable where a library is missing. Another device is never taken in its place.
    """
    if not gpu.is_gpu(wanted):
        return HOST
    if torch.version.cuda is None:
        raise ConfigError(
            f"no CUDA device: {wanted} was asked for, and this torch ({torch.__version__}) is "
            "built for the CPU alone; install a CUDA build of torch"
        )
    runtime = load()
    info = find_device(runtime, wanted)
    try:
        runtime.set_device(info.index)
        free = runtime.free_bytes()
    except CudaError as error:
        raise DeviceAbsent(f"no CUDA device: {wanted} cannot be used; {explain(error)}") from error
    facts = gather(runtime, info)
    return Device(torch.device("cuda", info.index), f"cuda:{info.uuid}", facts, free)


def gather(runtime: CudaRuntime, info: DeviceInfo) -> GpuFacts:
    """The facts of one GPU; a page of its memory is exported to see whether that is possible."""
    return GpuFacts(
        uuid=info.uuid,
        name=info.name,
        driver=runtime.driver_version(),
        mig=info.mig,
        mps=gpu.mps_runs(os.environ),
        obstacle=gpu.WSL_OBSTACLE if gpu.is_wsl() else _export_obstacle(runtime, info),
    )


def _export_obstacle(runtime: CudaRuntime, info: DeviceInfo) -> str:
    """Why memory of this GPU cannot be shared between processes; empty when it can."""
    try:
        runtime.set_device(info.index)
        pointer = runtime.malloc(PROBE_BYTES)
        try:
            runtime.export_memory(pointer)
        finally:
            runtime.free(pointer)
    except CudaError as error:
        return explain(error)
    return ""


def survey(load: Callable[[], CudaRuntime] = load_runtime) -> tuple[tuple[GpuFacts, ...], str]:
    """All GPUs that this process sees; where there is none, why."""
    if torch.version.cuda is None:
        return (), f"this torch ({torch.__version__}) is built for the CPU alone"
    try:
        runtime = load()
        return tuple(gather(runtime, info) for info in runtime.devices()), ""
    except CudaError as error:
        return (), explain(error)
