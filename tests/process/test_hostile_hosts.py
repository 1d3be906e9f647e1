"""Shared memory: a host whose answer does not fit its memory is not believed."""

import array
import contextlib
import fcntl
import gc
import mmap
import os
import socket
import threading

import msgspec
import pytest
import torch
from support.held import descriptors, mappings
from support.ring_peers import LIFE, NONCE, SHAPE, expected_rows, write_forward

from protocol import arena_layout, sealed_memory
from protocol.arena_layout import Layout, Place, Refusal
from protocol.errors import (
    DaemonError,
    DeadlineExceeded,
    InternalError,
    ProtocolError,
    StaleMessage,
    TransportRefused,
)
from protocol.transports.shared_memory import TRANSPORT

pytestmark = pytest.mark.process


@pytest.fixture
def host(runtime_dir):
    half = TRANSPORT.host(runtime_dir)
    yield half
    half.close()
    gc.collect()


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
