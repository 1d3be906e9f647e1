"""Sealed memory between real processes: a racing reader, a writer that dies, hostile peers."""

import contextlib
import faulthandler
import gc
import os
import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support import ring_target
from support.held import descriptors, mappings
from support.ring_peers import LIFE, NONCE, SHAPE, attach, expected_rows

from protocol import arena_layout, ring_socket
from protocol.arena_layout import Ask
from protocol.errors import (
    FeatureExpired,
    InsufficientMemory,
    InternalError,
    TransportRefused,
)
from protocol.feature_ring import plan
from protocol.transports.base import WeightSpec
from protocol.transports.shared_memory import TRANSPORT

pytestmark = pytest.mark.process
ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"


@pytest.fixture
def host(runtime_dir):
    half = TRANSPORT.host(runtime_dir)
    yield half
    half.close()
    gc.collect()


@contextlib.contextmanager
def target_process(run_dir, seconds):
    """Run support/ring_target.py; yields it and a guest that is attached to it."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{TESTS}", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, TESTS / "support" / "ring_target.py", run_dir, str(seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        guest = TRANSPORT.attach(
            str(run_dir / "ring.sock"),
            nonce=NONCE,
            life=LIFE,
            shape=ring_target.SHAPE,
            timeout=60,
        )
        yield process, guest
        guest.close()
    finally:
        process.kill()
        process.wait(60)
        process.stdin.close()
        process.stdout.close()


class Reader:
    """Reads what is committed, again and again, and judges every row."""

    def __init__(self, guest):
        self.guest = guest
        self.progress = guest.weights()["progress"]
        self.heights, self.owner = guest._view.written_high, guest._view.owner
        self.sequence = self.seen = 0
        self.taken = self.missed = self.expired = self.sequences = 0

    def step(self):
        both = int(self.progress[0])
        sequence, committed = both >> 32, both & 0xFFFFFFFF
        if sequence != self.sequence:
            self.sequence, self.seen = sequence, 0
            self.sequences += 1
        if sequence == 0 or committed == self.seen:
            return
        try:
            got = self.guest.read_rows(0, sequence, self.seen, committed)
        except FeatureExpired:
            self.expired += 1
            return
        right = expected_rows(ring_target.SHAPE, sequence, got.start, committed)
        assert torch.equal(got.rows, right), (sequence, got.start, committed)
        oldest = int(self.heights[0]) - ring_target.SHAPE.capacity
        if int(self.owner[0]) == sequence:  # else the height, read before it, may be the next one's
            assert got.start <= min(committed, max(self.seen, oldest))
        self.taken += committed - got.start
        self.missed += got.start - self.seen
        self.seen = committed


def test_a_reader_that_races_the_smallest_ring_takes_only_right_rows(runtime_dir):
    with target_process(runtime_dir, 1.0) as (process, guest):
        reader = Reader(guest)
        process.stdin.write("go\n")
        process.stdin.flush()
        while not select.select([process.stdout], [], [], 0)[0]:
            reader.step()
        written = int(process.stdout.readline())
        assert process.wait(60) == 0
        assert reader.taken > 100  # it kept up at times,
        assert reader.missed > 0  # was lapped at others,
        assert 2 < reader.sequences <= written  # and saw the slot change hands
        del reader


@pytest.mark.fault
def test_a_guest_reads_on_after_the_host_was_killed_and_a_new_host_takes_the_path(runtime_dir):
    with target_process(runtime_dir, 60) as (process, guest):
        process.stdin.write("go\n")
        process.stdin.flush()
        progress = guest.weights()["progress"]
        while int(progress[0]) & 0xFFFFFFFF < 64:
            assert process.poll() is None
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
        both = int(progress[0])
        sequence, committed = both >> 32, both & 0xFFFFFFFF
        with contextlib.suppress(FeatureExpired):  # killed between two sequences
            got = guest.read_rows(0, sequence, 0, committed)
            right = expected_rows(ring_target.SHAPE, sequence, got.start, committed)
            assert torch.equal(got.rows, right)
        assert guest.weights()["embed"].eq(3.0).all()
        address = str(runtime_dir / "ring.sock")
        with pytest.raises(TransportRefused, match="no target offers"):
            TRANSPORT.attach(address, nonce=NONCE, life=LIFE, shape=ring_target.SHAPE, timeout=1.0)
        successor = TRANSPORT.host(runtime_dir)
        view = successor.create_ring(SHAPE)
        successor.offer(NONCE, LIFE + 1)
        attach(TRANSPORT, successor, runtime_dir, SHAPE, life=LIFE + 1).close()
        del view, progress
        successor.close()


# --- a reader cannot write -------------------------------------------------------------------


def ring_descriptor(host, run_dir):
    """Fetch the descriptors as a guest gets them; return the ring's and its size."""
    with ThreadPoolExecutor(1) as pool:
        ask = Ask(nonce=NONCE, life=LIFE)
        future = pool.submit(ring_socket.fetch, str(run_dir / "ring.sock"), ask, 5.0)
        while not future.done():
            if select.select([host.fileno()], [], [], 0.01)[0]:
                host.serve()
        layout, descriptors = future.result()
    for fd in descriptors[1:]:
        os.close(fd)
    return descriptors[0], layout.arenas[0]


WRITES = """
import ctypes, mmap, os, sys
fd, size = int(sys.argv[1]), int(sys.argv[2])
libc = ctypes.CDLL(None, use_errno=True)
both = mmap.PROT_READ | mmap.PROT_WRITE
reading = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
def protect():
    if libc.mprotect(ctypes.c_void_p(address), size, both):
        raise OSError(ctypes.get_errno(), "mprotect")
def reopen(): return os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
ways = {
    "map": lambda: mmap.mmap(fd, size, mmap.MAP_SHARED, both),
    "reopen and map": lambda: mmap.mmap(reopen(), size, mmap.MAP_SHARED, both),
    "write": lambda: os.write(fd, b"x"),
    "reopen and write": lambda: os.pwrite(reopen(), b"x", 0),
    "mprotect": protect,
    "shrink": lambda: os.ftruncate(fd, size - 1),
    "grow": lambda: os.ftruncate(fd, size + 1),
    "truncate": lambda: os.truncate(f"/proc/self/fd/{fd}", 0),
    "store": lambda: reading.__setitem__(0, 1),
}
for name, way in ways.items():
    try:
        way()
    except (OSError, TypeError) as error:
        print(name, "refused")
    else:
        print(name, "DONE")
"""


def test_a_reader_process_finds_no_way_to_write(host, runtime_dir):
    view = host.create_ring(SHAPE)
    host.offer(NONCE, LIFE)
    fd, size = ring_descriptor(host, runtime_dir)
    view.rows.fill_(1.5)
    done = subprocess.run(
        [sys.executable, "-c", WRITES, str(fd), str(size)],
        check=True,
        pass_fds=[fd],
        capture_output=True,
        text=True,
        timeout=60,
    )
    os.close(fd)
    assert done.stderr == ""
    assert done.stdout.count("refused") == 9
    assert "DONE" not in done.stdout
    assert view.rows.eq(1.5).all()
    view.rows.fill_(2.5)  # the owner can still


@pytest.mark.fault
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")  # it only stores
def test_a_store_into_a_borrowed_tensor_ends_the_reader_and_not_the_owner(host, runtime_dir):
    host.create_ring(SHAPE)
    ours = host.create_weights({"embed": WeightSpec((4, 4), "float32")})
    ours["embed"].fill_(1.0)
    host.offer(NONCE, LIFE)
    guest = attach(TRANSPORT, host, runtime_dir, SHAPE)
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        guest.weights()["embed"][0, 0] = 9.0
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGSEGV
    assert ours["embed"].eq(1.0).all()
    guest.close()


# --- memory and what is left of it -----------------------------------------------------------


def shared_kib():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssShmem"):
            return int(line.split()[1])
    raise AssertionError("no RssShmem")


def test_closing_leaves_no_descriptor_mapping_or_socket_file(runtime_dir):
    before = (descriptors(), mappings())
    host = TRANSPORT.host(runtime_dir)
    view = host.create_ring(SHAPE)
    weights = host.create_weights({"embed": WeightSpec((4, 4), "bfloat16")})
    host.offer(NONCE, LIFE)
    assert (runtime_dir / "ring.sock").stat().st_mode & 0o777 == 0o600
    guest = attach(TRANSPORT, host, runtime_dir, SHAPE)
    assert mappings() == before[1] + 4
    guest.close()
    assert mappings() == before[1] + 2
    host.close()
    del view, weights
    assert (descriptors(), mappings()) == before
    assert os.listdir(runtime_dir) == []


def test_a_tensor_that_outlives_both_halves_can_still_be_read(host, runtime_dir):
    host.create_ring(SHAPE)
    host.create_weights({"embed": WeightSpec((4, 4), "float32")})["embed"].fill_(4.0)
    host.offer(NONCE, LIFE)
    guest = attach(TRANSPORT, host, runtime_dir, SHAPE)
    kept = guest.weights()["embed"][1:, 2]
    guest.close()
    host.close()
    gc.collect()
    assert kept.eq(4.0).all()
    del kept
    assert mappings() == 0


def test_a_large_ring_takes_memory_only_where_it_is_written(host):
    before = shared_kib()
    shape = plan(slots=5, window=4096, widest_forward=256, row_width=15360, dtype="float32")
    view = host.create_ring(shape)
    assert view.rows.nbytes > 1 << 30
    assert shared_kib() - before < 64
    view.rows[1, 0].fill_(1.0)
    assert 60 <= shared_kib() - before < 256


def test_tensors_are_aligned_to_cache_lines(host):
    host.create_ring(SHAPE)
    odd = {f"w{n}": WeightSpec((n,), "bfloat16") for n in (1, 3, 31, 33)}
    for tensor in host.create_weights(odd).values():
        assert tensor.data_ptr() % 64 == 0


def test_a_size_that_no_machine_has_is_refused_before_it_is_tried(host):
    with pytest.raises(InsufficientMemory, match=str(1 << 44)):
        host.create_weights({"head": WeightSpec((1 << 40, 8), "float32")})


def test_allocating_after_the_offer_is_a_defect(host):
    host.create_ring(SHAPE)
    host.offer(NONCE, LIFE)
    with pytest.raises(InternalError, match="after the offer"):
        host.create_weights({"embed": WeightSpec((4, 4), "float32")})


def test_more_arenas_than_a_guest_would_take_are_a_defect(host):
    for number in range(arena_layout.MAX_ARENAS):
        host.create_weights({f"w{number}": WeightSpec((1,), "float32")})
    with pytest.raises(InternalError, match="are the most"):
        host.create_ring(SHAPE)
