"""The rules of sharing a GPU's memory, on a fake that fails the test where one is broken."""

import dataclasses
import logging
import sys

import msgspec
import pytest
import torch
from support import fake_cuda
from support.fake_cuda import FakeCuda, Violation, driven, gpu
from support.ring_peers import LIFE, NONCE, attach, expected_rows, write_forward

from protocol import arena_layout
from protocol.arena_layout import DeviceArena, Layout, Place, Probed
from protocol.config import Deadlines
from protocol.errors import (
    DeadlineExceeded,
    DeviceAbsent,
    DeviceLost,
    InternalError,
    ProtocolError,
    TransportRefused,
    Unavailable,
)
from protocol.feature_ring import plan
from protocol.transports import cuda_ipc, cuda_memory, cuda_probe
from protocol.transports.base import WeightSpec
from protocol.transports.cuda_ipc import CudaIpc
from protocol.transports.cuda_runtime import MEANINGS, find_device, load_runtime

SHAPE = plan(slots=2, window=5, widest_forward=4, row_width=6, dtype="float32")
SPECS = {"embed": WeightSpec((10, 6), "bfloat16")}


@pytest.fixture
def fakes():
    both = FakeCuda(process="target"), FakeCuda(process="draft")
    yield both
    assert [fake.left() for fake in both] == [[], []]


@pytest.fixture
def impatient(monkeypatch):
    """Waits of a tenth of a second."""
    short = msgspec.structs.replace(Deadlines(), ring_copy=0.1, ring_release=0.1)
    for module in (cuda_ipc, cuda_memory, cuda_probe):
        monkeypatch.setattr(module, "Deadlines", lambda: short)


def offered(fakes, run_dir, **options):
    """A driven transport with a ring and weights that are offered, and slot 0 given to 3."""
    transport = driven(CudaIpc, *fakes, **options)
    host = transport.host(run_dir)
    view = host.create_ring(SHAPE)
    host.create_weights(SPECS)["embed"].fill_(2.0)
    host.offer(NONCE, LIFE)
    view.claim(0, 3)
    return transport, host, view


def test_a_gpu_is_found_by_its_uuid_whatever_number_a_process_gives_it(fakes, runtime_dir):
    target, draft = fakes
    target.devices_seen = fake_cuda.TWO
    draft.devices_seen = (_numbered(gpu(1), 0),)  # CUDA_VISIBLE_DEVICES=1
    transport = driven(CudaIpc, target, draft, device="cuda:1")
    host = transport.host(runtime_dir)
    host.create_ring(SHAPE)
    host.create_weights(SPECS)["embed"].fill_(2.0)
    host.offer(NONCE, LIFE)
    draft.peers = False  # it is one GPU: nothing is asked of a link
    guest = attach(transport, host, runtime_dir, SHAPE)
    assert guest.weights()["embed"].eq(2.0).all()
    assert draft.calls.count("empty") == 0  # mapped, not copied
    guest.close()
    host.close()


def _numbered(device, index):
    return dataclasses.replace(device, index=index)


def test_another_gpu_copies_the_head_once_and_rows_over_the_link(fakes, runtime_dir):
    fakes[1].devices_seen = (gpu(1),)
    transport, host, view = offered(fakes, runtime_dir)
    guest = attach(transport, host, runtime_dir, SHAPE)
    assert fakes[1].calls.count("empty") == 1
    theirs = guest.weights()["embed"]
    assert theirs.eq(2.0).all()
    write_forward(view, 0, 3, 0, 4)
    for _ in range(2):
        assert torch.equal(guest.read_rows(0, 3, 0, 4).rows, expected_rows(SHAPE, 3, 0, 4))
    assert guest.weights()["embed"] is theirs
    guest.close()
    host.close()


def test_what_the_draft_writes_into_all_it_has_mapped_hurts_only_the_draft(fakes, runtime_dir):
    transport = driven(CudaIpc, *fakes)
    host = transport.host(runtime_dir)
    view = host.create_ring(SHAPE)
    ours = host.create_weights(SPECS)["embed"]
    ours.fill_(2.0)
    host.offer(NONCE, LIFE)
    guest = attach(transport, host, runtime_dir, SHAPE)
    for tensor in guest._imports.tensors.values():
        tensor.fill_(77)
    assert ours.eq(2.0).all()
    assert view.owner.tolist() == [-1, -1]
    assert view.written_high.tolist() == [0, 0]
    guest.close()
    host.close()


@pytest.mark.parametrize(
    ("theirs", "peers", "words"),
    [
        ((gpu(0), gpu(1)), False, "no peer access.*put both daemons on one GPU"),
        ((gpu(1, mig=True),), True, "MIG"),
    ],
)
def test_gpus_that_cannot_share_are_refused_with_reason_and_remedy(
    fakes, runtime_dir, theirs, peers, words
):
    fakes[1].devices_seen, fakes[1].peers = theirs, peers
    transport, host, _ = offered(fakes, runtime_dir)
    with pytest.raises(TransportRefused, match=words):
        attach_as(transport, host, runtime_dir, "cuda:1")
    host.close()


def attach_as(transport, host, run_dir, device):
    class There(transport):
        @classmethod
        def attach(cls, address, **options):
            return super().attach(address, device=device, **options)

    return attach(There, host, run_dir, SHAPE)


@pytest.mark.parametrize("name", MEANINGS)
@pytest.mark.parametrize("side", ["export", "import"])
def test_what_cuda_refuses_is_said_with_its_meaning_and_leaves_nothing(
    fakes, runtime_dir, name, side
):
    transport, host, _ = offered(fakes, runtime_dir)
    if side == "export":
        fakes[0].refuses["export_memory"] = name
    else:
        fakes[1].refuses["open_memory"] = name
    with pytest.raises(TransportRefused, match=name) as caught:
        attach(transport, host, runtime_dir, SHAPE)
    assert MEANINGS[name] in str(caught.value)
    host.close()


def test_an_error_that_nobody_knows_is_said_as_it_is(fakes, runtime_dir):
    transport, host, _ = offered(fakes, runtime_dir)
    fakes[1].refuses["open_memory"] = "cudaErrorUnknown"
    with pytest.raises(TransportRefused, match=r"open_memory: cudaErrorUnknown$"):
        attach(transport, host, runtime_dir, SHAPE)
    host.close()


@pytest.mark.parametrize("spoil", ["the target's", "the draft's"])
def test_a_pattern_that_does_not_arrive_refuses_the_pair(fakes, runtime_dir, monkeypatch, spoil):
    transport, host, _ = offered(fakes, runtime_dir)
    side = cuda_probe.HOST if spoil == "the target's" else cuda_probe.GUEST
    honest = cuda_probe.write

    def spoiled(runtime, place, seed):
        honest(runtime, place, seed)
        if (runtime is fakes[0]) == (side == cuda_probe.HOST):
            place[3] += 1

    monkeypatch.setattr(cuda_probe, "write", spoiled)
    with pytest.raises(TransportRefused, match=r"did not arrive.*draft on the CPU"):
        attach(transport, host, runtime_dir, SHAPE)
    host.close()


def test_rows_wait_for_the_event_of_the_forward_and_give_up_at_the_deadline(
    fakes, runtime_dir, impatient
):
    transport, host, view = offered(fakes, runtime_dir, hand_over="event")
    guest = attach(transport, host, runtime_dir, SHAPE)
    fakes[0].held = True
    write_forward(view, 0, 3, 0, 4)  # publishing returns at once: the reply may go out
    with pytest.raises(DeadlineExceeded, match="the target's feature rows: not complete"):
        guest.read_rows(0, 3, 0, 4)
    fakes[0].release()
    assert torch.equal(guest.read_rows(0, 3, 0, 4).rows, expected_rows(SHAPE, 3, 0, 4))
    guest.close()
    host.close()


def test_synchronising_the_reply_waits_for_the_rows(fakes, runtime_dir, impatient):
    transport, host, view = offered(fakes, runtime_dir)
    guest = attach(transport, host, runtime_dir, SHAPE)
    assert guest._imports.events == []
    fakes[0].held = True
    with pytest.raises(DeadlineExceeded, match="the forward's feature rows"):
        view.publish(0, 0, 4)
    fakes[0].release()
    guest.close()
    host.close()


def test_more_hand_overs_than_events_still_order_the_rows(fakes, runtime_dir):
    transport, host, view = offered(fakes, runtime_dir, hand_over="event")
    guest = attach(transport, host, runtime_dir, SHAPE)
    for base in range(0, 4 * 3 * cuda_memory.EVENTS, 4):
        write_forward(view, 0, 3, base, 4)
        right = expected_rows(SHAPE, 3, base, base + 4)
        assert torch.equal(guest.read_rows(0, 3, base, base + 4).rows, right)
    guest.close()
    host.close()


def test_a_copy_is_taken_only_when_it_is_complete(fakes, runtime_dir, impatient):
    transport, host, view = offered(fakes, runtime_dir)
    guest = attach(transport, host, runtime_dir, SHAPE)
    write_forward(view, 0, 3, 0, 4)
    fakes[1].held = True
    with pytest.raises(DeadlineExceeded, match="the copy of feature rows"):
        guest.read_rows(0, 3, 0, 4)
    fakes[1]._queue.clear()
    fakes[1].held = False
    guest.close()
    host.close()


def test_memory_of_a_target_that_is_gone_is_not_touched(fakes, runtime_dir):
    transport, host, view = offered(fakes, runtime_dir)
    guest = attach(transport, host, runtime_dir, SHAPE)
    write_forward(view, 0, 3, 0, 4)
    host._server.close()  # as the kernel does when the process ends
    launched = len(fakes[1].calls)
    with pytest.raises(DeviceLost, match="gone"):
        guest.read_rows(0, 3, 0, 4)
    assert len(fakes[1].calls) == launched
    guest.close()
    host.close()


def test_nothing_is_freed_under_a_draft_that_does_not_let_go(fakes, runtime_dir, impatient):
    transport, host, _ = offered(fakes, runtime_dir)
    guest = attach(transport, host, runtime_dir, SHAPE)
    host.close()  # the fake would object
    assert fakes[0].left()
    guest.close()
    fakes[0].abandon()


def test_cuda_errors_in_a_round_are_typed(fakes, runtime_dir):
    transport, host, view = offered(fakes, runtime_dir)
    guest = attach(transport, host, runtime_dir, SHAPE)
    write_forward(view, 0, 3, 0, 4)
    fakes[1].refuses["copy_async"] = "cudaErrorIllegalAddress"
    with pytest.raises(DeviceLost, match="cudaErrorIllegalAddress"):
        guest.read_rows(0, 3, 0, 4)
    fakes[0].refuses["record_event"] = "cudaErrorLaunchFailure"
    with pytest.raises(DeviceLost, match="cudaErrorLaunchFailure"):
        view.publish(0, 0, 4)
    guest.close()
    host.close()


def test_letting_go_logs_what_cuda_says_and_ends_the_lease(fakes, runtime_dir, caplog):
    transport, host, _ = offered(fakes, runtime_dir)
    guest = attach(transport, host, runtime_dir, SHAPE)
    fakes[1].refuses["close_memory"] = "cudaErrorLaunchFailure"
    with caplog.at_level(logging.WARNING):
        guest.close()
    assert "cudaErrorLaunchFailure" in caplog.text
    fakes[1].abandon()
    assert host._server.wait_for_guests(2.0)
    host.close()


def test_an_export_is_made_once_and_only_for_a_draft(fakes, runtime_dir):
    transport, host, _ = offered(fakes, runtime_dir)
    assert fakes[0].calls.count("malloc") == 1
    for _ in range(2):
        attach(transport, host, runtime_dir, SHAPE).close()
    assert fakes[0].calls.count("malloc") == 3  # the ring, the copy, and the probe's pages
    host.close()


def test_what_is_asked_before_its_time_is_a_defect(fakes, runtime_dir):
    transport = driven(CudaIpc, *fakes)
    host = transport.host(runtime_dir)
    with pytest.raises(InternalError, match="without a ring"):
        host._publish(0, 0, 1)
    with pytest.raises(InternalError, match="before it was created"):
        host._layout()
    host.close()
    imports = cuda_memory.Imports(fakes[1], None, "nowhere")
    with pytest.raises(InternalError, match="let go"):
        imports.ask(arena_layout.Ask(nonce=1, life=1), 1.0)
    with pytest.raises(DeviceLost):
        imports.check_owner()


# --- devices and libraries -------------------------------------------------------------------


def test_a_machine_without_a_gpu_says_so_and_never_takes_the_cpu():
    with pytest.raises(
        DeviceAbsent, match=r"no CUDA device: cuda:0 .*cudaErrorNoDevice.*sees no GPU"
    ):
        find_device(FakeCuda(devices_seen=()), "cuda:0")


@pytest.mark.parametrize("wanted", ["cuda:7", "cuda:GPU-1", "cuda:", "cuda:-1"])
def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(wanted):
    with pytest.raises(DeviceAbsent, match=rf"no CUDA device {wanted}; .*cuda:0 \(GPU-.*cuda:1"):
        find_device(FakeCuda(devices_seen=fake_cuda.TWO), wanted)


def test_a_gpu_can_be_named_by_number_or_uuid():
    fake = FakeCuda(devices_seen=fake_cuda.TWO)
    assert find_device(fake, "cuda:1") == gpu(1)
    assert find_device(fake, f"cuda:{gpu(1).uuid}") == gpu(1)


def test_without_cupy_the_extra_to_install_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "protocol.transports.cupy_runtime", raising=False)
    with pytest.raises(Unavailable, match=r"cupy.* is not installed.*cuda13"):
        load_runtime()


# --- hostile layouts -------------------------------------------------------------------------

HANDLE = b"h" * 64
ROWS = Place(name="ring.rows", dtype="float32", shape=(2, 9, 6), arena=0, offset=0)


def layout(**changes):
    fields = {"handle": HANDLE, "size": 432, "places": (ROWS,), **changes}
    heads = {"ring.owner": ("int64", (2,)), "ring.written_high": ("int64", (2,))}
    places, size = arena_layout.arrange(heads, 0)
    devices = (DeviceArena(**fields),)
    return Layout(arenas=(size,), places=tuple(places), uuid="GPU-x", devices=devices)


def test_an_honest_layout_fits():
    assert arena_layout.check_places(layout(), SHAPE)["ring.rows"] == ROWS


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size": 431}, "bytes 0..432 of 431"),
        ({"offset": 64}, "bytes 0..432 of 368"),
        ({"offset": 1000}, "of -568"),
        ({"places": (ROWS, ROWS)}, "announced twice"),
        ({"places": (msgspec.structs.replace(ROWS, arena=1),)}, "arena 1 of 1"),
        ({"places": ()}, "expected .* found nothing"),
    ],
)
def test_places_outside_a_device_arena_are_refused(changes, words):
    with pytest.raises(TransportRefused, match=words):
        arena_layout.check_places(layout(**changes), SHAPE)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda plain: plain["devices"][0].update(handle=b"short"),
        lambda plain: plain["devices"][0].update(size=-1),
        lambda plain: plain.update(events=[HANDLE] * 65),
        lambda plain: plain.update(devices=plain["devices"] * 5),
    ],
    ids=["a short handle", "a negative size", "too many events", "too many arenas"],
)
def test_handles_and_counts_are_bounded(spoil):
    plain = msgspec.to_builtins(layout(), builtin_types=(bytes,))
    plain["devices"] = [dict(each) for each in plain["devices"]]
    spoil(plain)
    with pytest.raises(ProtocolError):
        arena_layout.decode_answer(msgspec.msgpack.encode(plain))


def test_a_lease_that_talks_nonsense_is_told_so_and_a_judgement_of_another_probe_is_refused(
    fakes, runtime_dir
):
    _, host, _ = offered(fakes, runtime_dir)
    answer = host._server._judge(b"\xc1")
    assert answer.code == "protocol"
    with pytest.raises(ProtocolError):
        arena_layout.decode_judgement(arena_layout.encode(layout()))
    assert arena_layout.decode_probed(arena_layout.encode(Probed(seed=5))) == Probed(seed=5)
    host.close()


# --- the fake itself -------------------------------------------------------------------------


def broken_rules():
    def open_own(fake):
        fake.open_memory(fake.export_memory(fake.malloc(8)))

    def export_inside(fake):
        fake.export_memory(fake.malloc(128) + 64)

    def free_twice(fake):
        pointer = fake.malloc(8)
        fake.free(pointer)
        fake.free(pointer)

    def unrecorded(fake):
        fake.is_complete(fake.create_event(shared=False))

    def close_nothing(fake):
        fake.close_memory(1234)

    def destroy_twice(fake):
        event = fake.create_event(shared=False)
        fake.destroy_event(event)
        fake.destroy_event(event)

    def view_nothing(fake):
        fake.view(4096, 8)

    return [value for value in locals().values() if callable(value)]


@pytest.mark.parametrize("break_rule", broken_rules(), ids=lambda each: each.__name__)
def test_the_fake_objects_to_what_cuda_leaves_undefined(break_rule):
    fake = FakeCuda()
    fake.set_device(0)
    with pytest.raises(Violation):
        break_rule(fake)
    fake.abandon()


def test_the_fake_objects_to_calls_before_the_device_and_to_freeing_under_an_importer():
    owner, other = FakeCuda(process="a"), FakeCuda(process="b")
    with pytest.raises(Violation, match="before the device"):
        owner.malloc(8)
    owner.set_device(0)
    pointer = owner.malloc(8)
    handle = owner.export_memory(pointer)
    with pytest.raises(Violation, match="before the device"):
        other.open_memory(handle)
    other.set_device(0)
    first, again = other.open_memory(handle), other.open_memory(handle)
    assert first == again
    other.close_memory(first)
    with pytest.raises(Violation, match="before the importers"):
        owner.free(pointer)
    other.close_memory(first)
    owner.free(pointer)
