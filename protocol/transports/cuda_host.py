"""``cuda-host``: the target on a GPU, the draft on the CPU, and rows copied once between them.

A forward writes its feature rows on the GPU. Before the reply goes out they are copied, in one
asynchronous copy for each unbroken run, into pinned memory that the draft maps as for ``shm``; the
reply waits for the copy's event. Embedding and head are copied for the first draft that asks.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Final

from torch import Tensor

from protocol.config import Deadlines, HandOver
from protocol.errors import InternalError
from protocol.feature_ring import RingShape, spans
from protocol.ring_server import Offer
from protocol.transports.base import FeatureHost, FeatureTransport, RingView, WeightSpec
from protocol.transports.cuda_memory import torch_dtype
from protocol.transports.cuda_runtime import (
    CudaRuntime,
    DeviceInfo,
    find_device,
    load_runtime,
    losing,
    refusing,
    wait_for,
)
from protocol.transports.shared_memory import SharedMemory, SharedMemoryHost


class CudaHost(SharedMemoryHost):
    """The target's half: what a draft maps is in host memory, and a copy."""

    def __init__(self, run_dir: Path, runtime: CudaRuntime, device: DeviceInfo) -> None:
        super().__init__(run_dir)
        self._runtime = runtime
        self._device = device
        self._pairs: tuple[RingView, RingView] | None = None  # on the GPU, in host memory
        self._done: int | None = None
        self._pinned = 0
        self._private: dict[str, Tensor] = {}
        self._mirrors: dict[str, Tensor] = {}

    def create_ring(self, shape: RingShape) -> RingView:
        mirror = super().create_ring(shape)
        with refusing():
            self._runtime.set_device(self._device.index)
            rows = self._runtime.empty(tuple(mirror.rows.shape), mirror.rows.dtype).zero_()
            if mirror.rows.nbytes:
                self._runtime.register_host(mirror.rows.data_ptr(), mirror.rows.nbytes)
                self._pinned = mirror.rows.data_ptr()
            self._done = self._runtime.create_event(shared=False)
        view = replace(mirror, rows=rows, publish=self._publish)
        self._pairs = (view, mirror)
        return view

    def create_weights(self, specs: Mapping[str, WeightSpec]) -> dict[str, Tensor]:
        mirrors = super().create_weights(specs)
        with refusing():
            self._runtime.set_device(self._device.index)
            made = {
                name: self._runtime.empty(spec.shape, torch_dtype(spec.dtype))
                for name, spec in specs.items()
            }
        self._private |= made
        self._mirrors |= mirrors
        return made

    def _publish(self, slot: int, start: int, stop: int) -> None:
        if self._pairs is None or self._done is None:
            raise InternalError("rows are published without a ring")
        here, there = (view.rows[slot] for view in self._pairs)
        with losing():
            for span in spans(start, stop, self._pairs[0].shape.capacity):
                rows = slice(span.row, span.row + span.stop - span.start)
                source, target = here[rows], there[rows]
                self._runtime.copy_async(target.data_ptr(), source.data_ptr(), source.nbytes)
            self._runtime.record_event(self._done)
            limit = Deadlines().ring_copy
            wait_for(self._runtime, self._done, limit, "the copy of feature rows to the host")

    def _layout(self) -> Offer:
        for name in list(self._mirrors):
            self._mirrors.pop(name).copy_(self._private[name])
        return super()._layout()

    def close(self) -> None:
        with losing():
            if self._pinned:
                self._runtime.unregister_host(self._pinned)
            if self._done is not None:
                self._runtime.destroy_event(self._done)
        self._pairs, self._done, self._pinned = None, None, 0
        self._private, self._mirrors = {}, {}
        super().close()


class CudaHostMemory(SharedMemory):
    """Two processes of one host, the target on a GPU and the draft on the CPU."""

    name: ClassVar[str] = "cuda-host"
    runtime: ClassVar[Callable[[], CudaRuntime]] = staticmethod(load_runtime)

    @classmethod
    def host(
        cls, run_dir: Path, device: str = "cuda:0", hand_over: HandOver = "synchronise"
    ) -> FeatureHost:
        del hand_over  # host memory is whole when the reply goes out
        runtime = cls.runtime()
        return CudaHost(run_dir, runtime, find_device(runtime, device))


TRANSPORT: Final[type[FeatureTransport]] = CudaHostMemory
