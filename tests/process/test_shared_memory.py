"""Sealed memory between real processes: a racing reader, a writer that dies, hostile peers."""

import array
import contextlib
import faulthandler
import fcntl
import gc
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
from support import ring_target
from support.ring_peers import LIFE, NONCE, attach, expected_rows, write_forward

from protocol import arena_layout, ring_socket, sealed_memory
from protocol.arena_layout import Ask, Layout, Place, Refusal
from protocol.errors import (
    DaemonError,
    DeadlineExceeded,
    FeatureExpired,
    InsufficientMemory,
    InternalError,
    PermissionRefused,
    ProtocolError,
    StaleMessage,
    TransportRefused,
)
from protocol.feature_ring import plan
from protocol.ring_server import MAX_WAITING
from protocol.transports.base import WeightSpec
from protocol.transports.shared_memory import TRANSPORT

pytestmark = pytest.mark.process
SHAPE = plan(slots=2, window=5, widest_forward=4, row_width=6, dtype="float32")
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


def mappings():
    return sum("memfd:dflash" in line for line in Path("/proc/self/maps").read_text().splitlines())


def descriptors():
    return len(os.listdir("/proc/self/fd"))


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


# --- hostile guests --------------------------------------------------------------------------


def connect(run_dir):
    guest = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    guest.settimeout(5)
    guest.connect(str(run_dir / "ring.sock"))
    return guest


def refusal_to(host, run_dir, packet):
    with connect(run_dir) as guest:
        guest.send(packet)
        host.serve()
        host.serve()
        data, fds, _, _ = socket.recv_fds(guest, 1 << 16, 4)
        assert fds == []
        return arena_layout.decode_answer(data)


@pytest.mark.parametrize(
    ("packet", "code"),
    [
        (b"\xc1", "protocol"),
        (b"x" * 10_000, "protocol"),
        (b"\x91" * 200, "protocol"),
        (arena_layout.encode(Ask(nonce=NONCE, life=LIFE)) + b"\0", "protocol"),
        (arena_layout.encode(Refusal(code="a", detail="b")), "protocol"),
        (msgspec.msgpack.encode({"type": "Ask", "nonce": -1, "life": LIFE}), "protocol"),
        (arena_layout.encode(Ask(nonce=NONCE + 1, life=LIFE)), "stale"),
        (arena_layout.encode(Ask(nonce=NONCE, life=LIFE - 1)), "stale"),
    ],
    ids=[
        "garbage",
        "oversize",
        "nested",
        "trailing byte",
        "a refusal",
        "negative nonce",
        "other nonce",
        "other life",
    ],
)
def test_a_guest_that_asks_wrongly_gets_a_typed_refusal_and_no_descriptor(
    host, runtime_dir, packet, code
):
    host.create_ring(SHAPE)
    host.offer(NONCE, LIFE)
    answer = refusal_to(host, runtime_dir, packet)
    assert isinstance(answer, Refusal)
    assert answer.code == code
    attach(TRANSPORT, host, runtime_dir, SHAPE).close()


def test_silent_and_vanishing_guests_lock_nobody_out(host, runtime_dir):
    host.create_ring(SHAPE)
    host.offer(NONCE, LIFE)
    silent = []
    for _ in range(3 * MAX_WAITING):
        silent.append(connect(runtime_dir))
        host.serve()
    gone = connect(runtime_dir)
    gone.send(arena_layout.encode(Ask(nonce=NONCE, life=LIFE)))
    gone.close()
    host.serve()
    host.serve()
    assert len(host._server.waiting) <= MAX_WAITING
    attach(TRANSPORT, host, runtime_dir, SHAPE).close()
    for guest in silent:
        guest.close()


STRANGER = """
import os, socket, sys
os.chdir(sys.argv[1]); os.setgid(65534); os.setuid(65534)
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.settimeout(10)
try:
    s.connect("ring.sock")
except PermissionError:
    print("mode"); sys.exit()
s.send(sys.stdin.buffer.read())
data, fds, _, _ = socket.recv_fds(s, 65536, 4)
print(len(fds), b"permission" in data)
"""


def stranger(host, run_dir):
    """Ask as another user of this machine; return what that user saw."""
    ask = arena_layout.encode(Ask(nonce=NONCE, life=LIFE))
    with ThreadPoolExecutor(1) as pool:
        command = [sys.executable, "-c", STRANGER, run_dir]
        future = pool.submit(
            subprocess.run, command, input=ask, capture_output=True, check=True, timeout=60
        )
        while not future.done():
            if select.select([host.fileno()], [], [], 0.01)[0]:
                host.serve()
    return future.result().stdout.decode().strip()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_another_user_is_refused_by_the_mode_and_behind_it_by_the_uid(host, runtime_dir):
    host.create_ring(SHAPE)
    host.offer(NONCE, LIFE)
    for folder in (runtime_dir, runtime_dir.parent):
        folder.chmod(0o711)
    assert stranger(host, runtime_dir) == "mode"
    (runtime_dir / "ring.sock").chmod(0o666)
    assert stranger(host, runtime_dir) == "0 True"


def test_both_ends_refuse_a_peer_of_another_user(host, runtime_dir, monkeypatch):
    host.create_ring(SHAPE)
    host.offer(NONCE, LIFE)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    answer = refusal_to(host, runtime_dir, arena_layout.encode(Ask(nonce=NONCE, life=LIFE)))
    assert answer.code == "permission"
    with pytest.raises(PermissionRefused, match=f"user {uid}, not {uid + 1}"):
        attach(TRANSPORT, host, runtime_dir, SHAPE)


def test_a_path_that_is_too_long_or_taken_by_a_file_is_refused(runtime_dir):
    deep = runtime_dir / ("x" * 100)
    deep.mkdir()
    for folder in (deep, runtime_dir):
        (runtime_dir / "ring.sock").touch()
        host = TRANSPORT.host(folder)
        view = host.create_ring(SHAPE)
        with pytest.raises(TransportRefused):
            host.offer(NONCE, LIFE)
        del view
        host.close()
    assert (runtime_dir / "ring.sock").exists()  # somebody else's
    (runtime_dir / "ring.sock").unlink()
    deep.rmdir()


# --- hostile hosts ---------------------------------------------------------------------------


def fake_host(run_dir, packet, fds):
    """Answer one guest with `packet` and `fds`, whatever they are; None: not at all."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(run_dir / "ring.sock"))
    listener.listen(1)

    def answer():
        connection, _ = listener.accept()
        with listener, connection:
            connection.recv(4096)
            if packet is None:
                connection.recv(4096)  # until the guest gives up
                return
            with contextlib.suppress(OSError):
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
                connection.sendmsg([packet], [rights] if fds else [])

    thread = threading.Thread(target=answer)
    thread.start()
    return thread


def attach_to_fake(run_dir, packet, fds, timeout=5.0):
    thread = fake_host(run_dir, packet, fds)
    try:
        address = str(run_dir / "ring.sock")
        return TRANSPORT.attach(address, nonce=NONCE, life=LIFE, shape=SHAPE, timeout=timeout)
    finally:
        thread.join(10)
        for fd in fds:
            os.close(fd)
        (run_dir / "ring.sock").unlink()


PLACES, SIZE = arena_layout.arrange(arena_layout.ring_tensors(SHAPE), 0)


def good_memory():
    fd, mapping = sealed_memory.create("dflash-fake", SIZE)
    mapping.close()
    return fd


def layout(*changes, sizes=(SIZE,), drop=()):
    """Encode the honest layout with `changes` (index, field, value), past our own checks."""
    plain = msgspec.to_builtins(Layout(arenas=sizes, places=tuple(PLACES)))
    plain["places"] = list(plain["places"])
    for index, field, value in changes:
        plain["places"][index] = {**plain["places"][index], field: value}
    plain["places"] = [place for n, place in enumerate(plain["places"]) if n not in drop]
    return msgspec.msgpack.encode(plain)


def test_the_honest_answer_of_the_fake_host_is_taken(runtime_dir):
    guest = attach_to_fake(runtime_dir, layout(), [good_memory()])
    assert guest.mapped_bytes() == SIZE
    guest.close()


ANSWERS = {
    "empty": (b"", TransportRefused),
    "garbage": (b"\xc1junk", ProtocolError),
    "nested": (b"\x91" * 5000, ProtocolError),
    "trailing byte": (layout() + b"\0", ProtocolError),
    "too long": (b"z" * 100_000, TransportRefused),
    "stale": (arena_layout.encode(Refusal(code="stale", detail="x")), StaleMessage),
    "unknown code": (arena_layout.encode(Refusal(code="no such code", detail="x")), InternalError),
    "no rows": (layout(drop=[2]), TransportRefused),
    "one name twice": (layout((2, "name", "ring.owner")), TransportRefused),
    "other shape": (layout((2, "shape", [2, 9, 7])), TransportRefused),
    "overflowing shape": (layout((2, "shape", [1 << 40, 1 << 40, 1 << 40])), TransportRefused),
    "negative shape": (layout((2, "shape", [-1, 9, 6])), ProtocolError),
    "five dimensions": (layout((2, "shape", [1, 1, 1, 1, 1])), ProtocolError),
    "other dtype": (layout((2, "dtype", "bfloat16")), TransportRefused),
    "unknown dtype": (layout((2, "dtype", "object")), TransportRefused),
    "absent arena": (layout((2, "arena", 1)), TransportRefused),
    "negative arena": (layout((2, "arena", -1)), ProtocolError),
    "fifth arena": (layout((2, "arena", 4)), ProtocolError),
    "misaligned": (layout((2, "offset", PLACES[2].offset + 1)), TransportRefused),
    "beyond the end": (layout((2, "offset", PLACES[2].offset + 64)), TransportRefused),
    "negative offset": (layout((2, "offset", -64)), ProtocolError),
    "huge offset": (layout((2, "offset", 1 << 63)), ProtocolError),
    "long name": (layout((0, "name", "x" * 1000)), ProtocolError),
    "one byte more": (layout(sizes=(SIZE + 1,)), TransportRefused),
    "terabytes": (layout(sizes=(1 << 43,)), TransportRefused),
    "second arena": (layout(sizes=(SIZE, SIZE)), TransportRefused),
    "no arena": (layout(sizes=()), TransportRefused),
}


@pytest.mark.parametrize("defect", ANSWERS)
def test_an_answer_that_does_not_fit_its_memory_is_refused(runtime_dir, defect):
    packet, error = ANSWERS[defect]
    before = mappings()
    with pytest.raises(error) as caught:
        attach_to_fake(runtime_dir, packet, [good_memory()])
    assert isinstance(caught.value, DaemonError)
    del caught
    assert mappings() == before


def memory(size, seals):
    fd = os.memfd_create("dflash-fake", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def a_file():
    return os.open("/proc/self/exe", os.O_RDONLY | os.O_CLOEXEC)


DESCRIPTORS = {
    "unsealed": lambda: memory(SIZE, 0),
    "writable by others": lambda: memory(
        SIZE, sealed_memory.SEALS & ~sealed_memory.F_SEAL_FUTURE_WRITE
    ),
    "can shrink": lambda: memory(SIZE, sealed_memory.SEALS & ~fcntl.F_SEAL_SHRINK),
    "truncated": lambda: memory(SIZE - 64, sealed_memory.SEALS),
    "empty": lambda: memory(0, sealed_memory.SEALS),
    "too large": lambda: memory(SIZE + 4096, sealed_memory.SEALS),
    "a file": a_file,
    "standard input": lambda: os.dup(0),
}


@pytest.mark.parametrize("kind", DESCRIPTORS)
def test_a_descriptor_that_is_not_fully_sealed_memory_of_its_size_is_refused(runtime_dir, kind):
    with pytest.raises(TransportRefused):
        attach_to_fake(runtime_dir, layout(), [DESCRIPTORS[kind]()])


@pytest.mark.parametrize("count", [0, 2, 5, 40])
def test_another_number_of_descriptors_is_refused_and_none_is_kept(runtime_dir, count):
    before = descriptors()
    with pytest.raises(TransportRefused):
        attach_to_fake(runtime_dir, layout(), [good_memory() for _ in range(count)])
    assert descriptors() == before


def test_a_host_that_does_not_answer_is_given_up_at_the_deadline(runtime_dir):
    with pytest.raises(DeadlineExceeded, match=r"within 0.05 s"):
        attach_to_fake(runtime_dir, None, [], timeout=0.05)


def test_a_layout_with_places_beyond_the_announced_arenas_names_the_tensor():
    place = Place(name="head", dtype="float32", shape=(2,), arena=3, offset=0)
    with pytest.raises(TransportRefused, match="head is in arena 3 of 1"):
        arena_layout.check_places(Layout(arenas=(SIZE,), places=(place,)), SHAPE)


def test_a_kernel_without_the_seal_is_refused_with_its_words(monkeypatch):
    monkeypatch.setattr(sealed_memory, "SEALS", 1 << 12)  # no kernel has this one
    before = descriptors()
    with pytest.raises(TransportRefused, match="Invalid argument"):
        sealed_memory.create("dflash-fake", 4096)
    assert descriptors() == before


def test_memory_is_written_through_the_mapping_that_was_there_before_the_seals(host):
    view = host.create_ring(SHAPE)
    view.claim(0, 1)
    write_forward(view, 0, 1, 0, 4)
    assert torch.equal(view.rows[0, :4], expected_rows(SHAPE, 1, 0, 4))
    fd, _ = host._arenas[0]
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == sealed_memory.SEALS
    with pytest.raises(PermissionError):
        mmap.mmap(fd, SIZE)
