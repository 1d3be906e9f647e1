"""CUDA's rules over host memory that real processes share: what the transports run on here.

`FakeCuda` is one process's view. Memory is a memfd that others reach through the exporter's
``/proc/PID/fd``, so that two real processes, or two fakes in one, share it as they would a GPU's.
What CUDA answers with an error raises `CudaError`, as the real runtime does; what CUDA leaves
undefined, and our code must therefore never do, raises `Violation`.
"""

import ctypes
import fcntl
import hashlib
import itertools
import mmap
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from protocol.transports.cuda_runtime import CudaError, DeviceInfo

PAGE = mmap.PAGESIZE
HANDLE = struct.Struct("<8sIIQ16s16s8x")  # kind, pid, fd, bytes, GPU, exporter
MEMORY, EVENT = b"fakemem1", b"fakeevt1"
MAX_IMPORTERS = 60


class Violation(AssertionError):
    """The code under test did what CUDA leaves undefined."""


def gpu(number, *, mig=False, ipc_events=True):
    kind = "MIG" if mig else "GPU"
    uuid = f"{kind}-00000000-0000-0000-0000-{number:012d}"
    name = f"Fake {number}{' MIG 1g.5gb' if mig else ''}"
    return DeviceInfo(number, uuid, name, mig, ipc_events, 1 << 34, (9, 0))


ONE = (gpu(0),)
TWO = (gpu(0), gpu(1))


class Segment:
    """A memfd, mapped, with a page behind it that counts who has it open."""

    def __init__(self, fd, size):
        self.fd, self.size = fd, size
        self.length = -(-max(size, 1) // PAGE) * PAGE
        self.mapping = mmap.mmap(fd, self.length + PAGE)
        self.bytes = np.frombuffer(self.mapping, dtype=np.uint8)
        self.importers = self.bytes[self.length :].view(np.int64)  # [0]: freed; then pids
        self.pointer = self.bytes.ctypes.data

    @classmethod
    def create(cls, name, size):
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(fd, -(-max(size, 1) // PAGE) * PAGE + PAGE)
        return cls(fd, size)

    def enter(self, old, new):
        """Replace pid `old` by `new` in the list of importers, alone."""
        fcntl.flock(self.fd, fcntl.LOCK_EX)
        try:
            place = 1 + self.importers[1 : MAX_IMPORTERS + 1].tolist().index(old)
            self.importers[place] = new
        finally:
            fcntl.flock(self.fd, fcntl.LOCK_UN)

    def opened_by(self):
        return [
            pid for pid in self.importers[1 : MAX_IMPORTERS + 1].tolist() if pid and _lives(pid)
        ]

    def drop(self):
        """Tensors over it keep the mapping until they are gone."""
        os.close(self.fd)
        del self.bytes, self.importers, self.mapping


def _lives(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@dataclass
class Imported:
    segment: Segment
    exporter: int
    device: int
    count: int = 1


@dataclass
class Event:
    segment: Segment
    shared: bool
    exporter: int = 0  # 0: created here

    @property
    def counts(self):
        return self.segment.bytes[:16].view(np.int64)  # recorded, completed


@dataclass
class FakeCuda:
    """`devices` in this process's order; `process` tells fakes of one process apart."""

    devices_seen: tuple = ONE
    process: str = ""
    peers: bool = True
    held: bool = False  # submitted work waits for `release`
    refuses: dict = field(default_factory=dict)  # verb: name of CUDA's error
    calls: list = field(default_factory=list)

    def __post_init__(self):
        self._me = hashlib.sha256(f"{os.getpid()}/{self.process}".encode()).digest()[:16]
        self._device = None
        self._owned, self._opened, self._events = {}, {}, {}
        self._pinned = {}
        self._numbers = itertools.count(1)
        self._queue = []

    # --- devices ---

    def devices(self):
        self._refuse("devices")
        if not self.devices_seen:
            raise CudaError("cudaErrorNoDevice", "counting GPUs")
        return self.devices_seen

    def driver_version(self):
        return "13.0"

    def free_bytes(self):
        self._need_device("free_bytes")
        return 1 << 33

    def set_device(self, index):
        if index not in [each.index for each in self.devices_seen]:
            raise CudaError("cudaErrorInvalidDevice", f"setting device {index}")
        self._device = index

    def can_access_peer(self, index, other):
        return self.peers and index != other  # CUDA denies it for one device

    def _need_device(self, verb):
        self._refuse(verb)
        self.calls.append(verb)
        if self._device is None:
            raise Violation(f"{verb} before the device was set")
        return next(each for each in self.devices_seen if each.index == self._device)

    def _refuse(self, verb):
        if verb in self.refuses:
            raise CudaError(self.refuses[verb], verb)

    # --- memory ---

    def malloc(self, size):
        device = self._need_device("malloc")
        segment = Segment.create("dflash-fakecuda", size)
        self._owned[segment.pointer] = (segment, device)
        return segment.pointer

    def free(self, pointer):
        self._need_device("free")
        if pointer not in self._owned:
            raise Violation("free of what is no base of an allocation, or was freed")
        segment, _ = self._owned[pointer]
        if users := segment.opened_by():
            raise Violation(f"free before the importers {users} have closed")
        del self._owned[pointer]
        segment.importers[0] = 1
        segment.drop()

    def export_memory(self, pointer):
        self._need_device("export_memory")
        if pointer not in self._owned:
            raise Violation("a handle is of the base of an allocation of one's own")
        segment, device = self._owned[pointer]
        return self._handle(MEMORY, segment, device)

    def _handle(self, kind, segment, device):
        packed = hashlib.sha256(device.uuid.encode()).digest()[:16]
        return HANDLE.pack(kind, os.getpid(), segment.fd, segment.size, packed, self._me)

    def _open(self, kind, handle):
        found, pid, fd, size, device, exporter = HANDLE.unpack(handle)
        if found != kind:
            raise CudaError("cudaErrorInvalidValue", "opening a handle of another kind")
        if exporter == self._me:
            raise Violation("a handle cannot be opened in the process that exported it")
        if not _lives(pid):
            raise CudaError("cudaErrorInvalidResourceHandle", "opening")
        try:
            mine = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise CudaError("cudaErrorInvalidContext", "opening") from error
        segment = Segment(mine, size)
        segment.enter(0, os.getpid())
        return segment, pid, device

    def open_memory(self, handle):
        here = self._need_device("open_memory")
        for pointer, imported in self._opened.items():
            if self._same(imported, handle):  # CUDA gives the same pointer, and counts
                imported.count += 1
                return pointer
        segment, pid, there = self._open(MEMORY, handle)
        same = there == hashlib.sha256(here.uuid.encode()).digest()[:16]
        if not same and not self.peers:
            segment.enter(os.getpid(), 0)
            segment.drop()
            raise CudaError("cudaErrorPeerAccessUnsupported", "opening")
        self._opened[segment.pointer] = Imported(segment, pid, self._device)
        return segment.pointer

    def _same(self, imported, handle):
        _, pid, fd, *_ = HANDLE.unpack(handle)
        if imported.exporter != pid or not _lives(pid):
            return False
        try:
            theirs = Path(f"/proc/{pid}/fd/{fd}").stat()
        except OSError:
            return False
        return theirs.st_ino == os.fstat(imported.segment.fd).st_ino

    def close_memory(self, pointer):
        self._need_device("close_memory")
        if pointer not in self._opened:
            raise Violation("closing what is not open, or another pointer than the base")
        imported = self._opened[pointer]
        if imported.device != self._device:
            raise Violation(f"opened on device {imported.device}, closed on {self._device}")
        imported.count -= 1
        if imported.count == 0:
            del self._opened[pointer]
            imported.segment.enter(os.getpid(), 0)
            imported.segment.drop()

    # --- events ---

    def create_event(self, *, shared):
        self._need_device("create_event")
        number = next(self._numbers)
        self._events[number] = Event(Segment.create("dflash-fakeevent", 16), shared)
        return number

    def destroy_event(self, event):
        self._need_device("destroy_event")
        found = self._events.pop(event, None)
        if found is None:
            raise Violation("an event is destroyed twice")
        if found.exporter:
            found.segment.enter(os.getpid(), 0)
        elif users := found.segment.opened_by():
            raise Violation(f"an event is destroyed before the importers {users} let go of it")
        found.segment.drop()

    def export_event(self, event):
        device = self._need_device("export_event")
        if not self._events[event].shared or self._events[event].exporter:
            raise CudaError("cudaErrorInvalidResourceHandle", "exporting a private event")
        return self._handle(EVENT, self._events[event].segment, device)

    def open_event(self, handle):
        self._need_device("open_event")
        segment, pid, _ = self._open(EVENT, handle)
        number = next(self._numbers)
        self._events[number] = Event(segment, shared=True, exporter=pid)
        return number

    def record_event(self, event):
        self._need_device("record_event")
        counts = self._events[event].counts
        counts[0] += 1
        number = int(counts[0])
        self._submit(lambda: counts.__setitem__(1, number))

    def is_complete(self, event):
        self._need_device("is_complete")
        found = self._events[event]
        recorded, completed = found.counts.tolist()
        if recorded == 0:
            raise Violation("an event is waited for before it was recorded: CUDA says complete")
        if found.exporter and not _lives(found.exporter):
            raise Violation("an event of a process that is gone")
        return completed >= recorded

    # --- copies ---

    def copy_async(self, destination, source, size):
        self._need_device("copy_async")
        for pointer in (destination, source):
            self._check_usable(pointer)
        self._submit(lambda: ctypes.memmove(destination, source, size))

    def _check_usable(self, pointer):
        for base, imported in self._opened.items():
            inside = base <= pointer < base + imported.segment.length
            if inside and (not _lives(imported.exporter) or imported.segment.importers[0]):
                raise Violation("memory of an exporter that is gone is poison")

    def _submit(self, work):
        if self.held:
            self._queue.append(work)
        else:
            work()

    def release(self):
        """Let everything that was submitted happen, and what comes later at once."""
        self.held = False
        queue, self._queue = self._queue, []
        for work in queue:
            work()

    def register_host(self, pointer, size):
        self._need_device("register_host")
        if pointer in self._pinned:
            raise CudaError("cudaErrorHostMemoryAlreadyRegistered", "pinning")
        self._pinned[pointer] = size

    def unregister_host(self, pointer):
        self._need_device("unregister_host")
        if self._pinned.pop(pointer, None) is None:
            raise CudaError("cudaErrorHostMemoryNotRegistered", "unpinning")

    def empty(self, shape, dtype):
        self._need_device("empty")
        return torch.empty(shape, dtype=dtype)

    def view(self, pointer, size):
        self._need_device("view")
        tables = [segment for segment, _ in self._owned.values()]
        tables += [imported.segment for imported in self._opened.values()]
        for segment in tables:
            if segment.pointer <= pointer and pointer + size <= segment.pointer + segment.length:
                start = pointer - segment.pointer
                return torch.from_numpy(segment.bytes[start : start + size])
        raise Violation("a view of memory that is neither owned nor open")

    # --- what a test asks ---

    def left(self):
        """What this process still holds."""
        return [
            *(f"allocation of {segment.size}" for segment, _ in self._owned.values()),
            *(f"import of {each.segment.size}" for each in self._opened.values()),
            *(f"event {number}" for number in self._events),
            *(f"pinned {size}" for size in self._pinned.values()),
        ]

    def abandon(self):
        """End as a process does that frees nothing: the driver takes everything back."""
        for imported in self._opened.values():
            imported.segment.enter(os.getpid(), 0)
            imported.segment.drop()
        for event in self._events.values():
            if event.exporter:
                event.segment.enter(os.getpid(), 0)
            event.segment.drop()
        for segment, _ in self._owned.values():
            segment.importers[0] = 1
            segment.drop()
        self._owned, self._opened, self._events = {}, {}, {}


def driven(transport, host, guest, **host_options):
    """`transport` over two fakes, one for each half."""

    class Driven(transport):
        @classmethod
        def host(cls, run_dir, *args, **options):
            cls.runtime = staticmethod(lambda: host)
            return super().host(run_dir, *args, **host_options, **options)

        @classmethod
        def attach(cls, address, **options):
            cls.runtime = staticmethod(lambda: guest)
            if cls.name == "cuda-ipc":
                options = {"device": f"cuda:{guest.devices_seen[0].index}", **options}
            return super().attach(address, **options)

    return Driven
