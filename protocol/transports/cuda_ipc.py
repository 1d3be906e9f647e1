"""``cuda-ipc``: the ring on the target's GPU, mapped by a draft on the same or another GPU.

The rows lie in a ``cudaMalloc`` allocation of their own; its handle travels over ``ring.sock``.
Owner and height of each slot stay in sealed host memory, as for ``shm``: both sides read them with
the host, and the seqlock is the same. CUDA IPC has no read-only mode, so what the draft maps for
embedding and head is an export copy, and the target reads nothing that the draft can write.

An opened handle is memory of another process. When that process is gone the memory is poison:
nothing is launched on it, and the draft is started again with the target.
"""

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar, Final

from torch import Tensor

from protocol import arena_layout, sealed_memory
from protocol.arena_layout import Ask, Layout, Probed
from protocol.config import RING_SOCKET, Deadlines, HandOver
from protocol.errors import InternalError
from protocol.feature_ring import RingShape, spans
from protocol.ring_server import Offer, RingServer
from protocol.transports import cuda_probe
from protocol.transports.base import (
    NO_OWNER,
    FeatureGuest,
    FeatureHost,
    FeatureTransport,
    RingView,
    Rows,
    WeightSpec,
)
from protocol.transports.cuda_memory import Arena, EventRing, Imports, torch_dtype
from protocol.transports.cuda_runtime import (
    CudaRuntime,
    DeviceInfo,
    find_device,
    load_runtime,
    losing,
    refusing,
    wait_for,
)
from protocol.transports.mapped import map_arenas, view_tensors
from protocol.transports.view_guest import ViewGuest

NAME: Final = "cuda-ipc"
ROWS: Final = "ring.rows"
RECORDED: Final = "ring.recorded"


class CudaIpcHost(FeatureHost):
    """The target's half: owns every allocation, and frees none that a draft still maps."""

    def __init__(
        self, run_dir: Path, runtime: CudaRuntime, device: DeviceInfo, hand_over: HandOver
    ) -> None:
        self._runtime = runtime
        self._device = device
        self._shares_events = hand_over == "event"
        self._server = RingServer(run_dir / RING_SOCKET, self._layout, self._check_probe)
        self._header: tuple[int, int, list[arena_layout.Place]] | None = None
        self._recorded: Tensor | None = None
        self._arenas: list[Arena] = []
        self._events: EventRing | None = None
        self._private: dict[str, Tensor] = {}
        self._probe: dict[str, Tensor] = {}

    def create_ring(self, shape: RingShape) -> RingView:
        if self._header is not None:
            raise InternalError("the ring is allocated twice")
        tensors = arena_layout.ring_tensors(shape)
        rows = {ROWS: tensors.pop(ROWS)}
        places, size = arena_layout.arrange({**tensors, RECORDED: ("int64", (1,))}, 0)
        fd, mapping = sealed_memory.create("dflash-ring", size)
        self._header = (fd, size, places)
        owner, high, self._recorded = view_tensors(mapping, places).values()
        owner.fill_(NO_OWNER)
        with refusing():
            self._runtime.set_device(self._device.index)
            arena = self._allocate(rows)
            self._events = EventRing(self._runtime, shared=self._shares_events)
        return RingView(shape, owner, high, arena.tensors[ROWS], self._publish)

    def _allocate(self, wanted: Mapping[str, tuple[str, tuple[int, ...]]]) -> Arena:
        arena = Arena(self._runtime, wanted)
        self._arenas.append(arena)
        return arena

    def create_weights(self, specs: Mapping[str, WeightSpec]) -> dict[str, Tensor]:
        taken = self._private.keys() & specs.keys()
        if self._server.is_open or taken:
            raise InternalError(
                f"weights are allocated twice ({sorted(taken)}), or after the offer"
            )
        with refusing():
            self._runtime.set_device(self._device.index)
            made = {
                name: self._runtime.empty(spec.shape, torch_dtype(spec.dtype))
                for name, spec in specs.items()
            }
        self._private |= made
        return made

    def offer(self, nonce: int, life: int) -> None:
        self._server.offer(nonce, life)

    def fileno(self) -> int:
        return self._server.fileno()

    def serve(self) -> None:
        self._server.serve()

    def _publish(self, slot: int, start: int, stop: int) -> None:
        """Record that what was submitted so far will have been written; see `RingView.publish`."""
        del slot, start, stop
        if self._recorded is None or self._events is None:
            raise InternalError("rows are published without a ring")
        with losing():
            self._events.record(int(self._recorded[0]))
        self._recorded[0] += 1

    def _layout(self) -> Offer:
        """Export what a draft needs; the copies are made for the first one that asks."""
        if self._header is None or self._events is None:
            raise InternalError("the ring is offered before it was created")
        with refusing():
            self._runtime.set_device(self._device.index)
            if not self._probe:
                self._export_copies()
            devices = tuple(arena.exported() for arena in self._arenas)
            events = self._events.exported()
            cuda_probe.write(self._runtime, self._probe[cuda_probe.HOST], cuda_probe.HOST_SEED)
        fd, size, places = self._header
        layout = Layout(
            arenas=(size,),
            places=tuple(places),
            uuid=self._device.uuid,
            devices=devices,
            events=events,
        )
        return layout, [fd]

    def _export_copies(self) -> None:
        wanted = {
            name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in self._private.items()
        }
        if wanted:
            copies = self._allocate(wanted).tensors
            for name, tensor in self._private.items():
                copies[name].copy_(tensor)
        self._probe = self._allocate(cuda_probe.TENSORS).tensors

    def _check_probe(self, probed: Probed) -> None:
        with refusing():
            cuda_probe.check(self._runtime, self._probe[cuda_probe.GUEST], probed.seed, "draft")

    def close(self) -> None:
        """Free everything once no draft maps it any more.

        Freeing under an importer is undefined; where one does not let go in time, the memory is
        left to the driver, which frees it with this process.
        """
        released = self._server.wait_for_guests(Deadlines().ring_release)
        self._server.close()
        self._private, self._probe, self._recorded = {}, {}, None
        if self._header is not None:
            os.close(self._header[0])
            self._header = None
        arenas, events = self._arenas, self._events
        self._arenas, self._events = [], None
        if released:
            with losing():
                if events is not None:
                    events.destroy()
                for arena in arenas:
                    arena.free()


class CudaIpcGuest(ViewGuest):
    """The draft's half: copies rows to its own GPU; `weights` are mapped, or copied once."""

    def __init__(
        self,
        runtime: CudaRuntime,
        imports: Imports,
        header: Mapping[str, Tensor],
        shape: RingShape,
        *,
        mapped: int,
    ) -> None:
        inner = {ROWS, *cuda_probe.TENSORS}
        weights = {name: imports.tensors[name] for name in imports.tensors.keys() - inner}
        owner, high = header["ring.owner"], header["ring.written_high"]
        super().__init__(RingView(shape, owner, high, imports.tensors[ROWS]), weights, mapped)
        self._runtime = runtime
        self._imports = imports
        self._recorded = header[RECORDED]

    def read_rows(self, slot: int, sequence: int, start: int, stop: int) -> Rows:
        if self._view is not None:
            self._imports.check_owner()
        with losing():
            return super().read_rows(slot, sequence, start, stop)

    def _gather(self, view: RingView, slot: int, first: int, stop: int) -> Tensor:
        """Copy rows to this GPU, asynchronously, and wait for the copy with a deadline."""
        runtime, limit = self._runtime, Deadlines().ring_copy
        recorded, events = int(self._recorded[0]), self._imports.events
        if recorded and events:
            # The latest record stands behind all earlier ones in the target's stream.
            event = events[(recorded - 1) % len(events)]
            wait_for(runtime, event, limit, "the target's feature rows")
        copy = runtime.empty((stop - first, view.shape.row_width), view.rows.dtype)
        for span in spans(first, stop, view.shape.capacity):
            source = view.rows[slot, span.row : span.row + span.stop - span.start]
            target = copy[span.start - first : span.stop - first]
            runtime.copy_async(target.data_ptr(), source.data_ptr(), source.nbytes)
        runtime.record_event(self._imports.done)
        wait_for(runtime, self._imports.done, limit, "the copy of feature rows")
        return copy

    def close(self) -> None:
        super().close()
        self._imports.close()


def _attach(runtime: CudaRuntime, device: DeviceInfo, imports: Imports, answer: Layout) -> None:
    """Open what `answer` offers, probe it both ways, and copy what another GPU must not read."""
    with refusing():
        imports.open(answer, device)
        cuda_probe.check(runtime, imports.tensors[cuda_probe.HOST], cuda_probe.HOST_SEED, "target")
        seed = cuda_probe.new_seed()
        cuda_probe.write(runtime, imports.tensors[cuda_probe.GUEST], seed)
        imports.confirm(Probed(seed=seed))
        if answer.uuid != device.uuid:
            imports.copy_over({ROWS, *cuda_probe.TENSORS})


class CudaIpc(FeatureTransport):
    """Two processes of one host, each on a GPU; the same GPU, or one that can read the other's."""

    name: ClassVar[str] = NAME
    runtime: ClassVar[Callable[[], CudaRuntime]] = staticmethod(load_runtime)

    @classmethod
    def host(
        cls, run_dir: Path, device: str = "cuda:0", hand_over: HandOver = "synchronise"
    ) -> FeatureHost:
        runtime = cls.runtime()
        return CudaIpcHost(run_dir, runtime, find_device(runtime, device), hand_over)

    @classmethod
    def attach(
        cls,
        address: str,
        *,
        nonce: int,
        life: int,
        shape: RingShape,
        timeout: float,
        device: str = "cuda:0",
    ) -> FeatureGuest:
        runtime = cls.runtime()
        info = find_device(runtime, device)
        imports = Imports(runtime, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), address)
        descriptors: list[int] = []
        try:
            answer, descriptors = imports.ask(Ask(nonce=nonce, life=life), timeout)
            arena_layout.check_places(answer, shape)
            header = map_arenas(answer, descriptors)
            _attach(runtime, info, imports, answer)
        except BaseException:
            imports.close()
            raise
        finally:
            for fd in descriptors:
                os.close(fd)
        mapped = sum(answer.arenas) + sum(each.size for each in answer.devices)
        return CudaIpcGuest(runtime, imports, header, shape, mapped=mapped)


TRANSPORT: Final[type[FeatureTransport]] = CudaIpc
