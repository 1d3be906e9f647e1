"""What every transport promises; a new file in protocol/transports is covered without an edit."""

import select

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import fake_cuda
from support.ring_peers import (
    LIFE,
    NONCE,
    address_of,
    attach,
    expected_rows,
    hosted,
    write_forward,
)

from protocol import plugins
from protocol.errors import (
    DeadlineExceeded,
    FeatureExpired,
    InternalError,
    ProtocolError,
    StaleMessage,
    TransportRefused,
)
from protocol.feature_ring import RingShape, plan
from protocol.placement import RULES
from protocol.transports.base import FeatureTransport, RingView, WeightSpec, read_whole

FOLDER, CONSTANT = "protocol.transports", "TRANSPORT"
TRANSPORTS = {
    name: plugins.load(FOLDER, name, CONSTANT, FeatureTransport)
    for name in plugins.names(FOLDER, CONSTANT)
}
# Those whose draft has a copy of embedding and head, and what they share beside them, in bytes.
COPIES_WEIGHTS = {"cuda-ipc", "cuda-host"}
EXTRAS = {"cuda-ipc": 1024}
SHAPE = plan(slots=2, window=5, widest_forward=4, row_width=6, dtype="float32")


@pytest.fixture(params=[*sorted(TRANSPORTS), "cuda_ipc by events", "cuda_ipc to a peer"])
def transport(request):
    """A transport as it is; those for GPUs over two fakes, which must hold nothing afterwards."""
    name, _, variant = request.param.partition(" ")
    if not name.startswith("cuda"):
        yield TRANSPORTS[name]
        return
    fakes = [fake_cuda.FakeCuda(process="target"), fake_cuda.FakeCuda(process="draft")]
    if variant == "to a peer":
        fakes[1].devices_seen = (fake_cuda.gpu(1),)  # which it calls by another number
    options = {"hand_over": "event"} if variant == "by events" else {}
    yield fake_cuda.driven(TRANSPORTS[name], *fakes, **options)
    assert [fake.left() for fake in fakes] == [[], []]


@pytest.fixture
def mapped(transport):
    if not transport.maps:
        pytest.skip(f"{transport.name} maps nothing of the target")


@pytest.fixture
def host(transport, runtime_dir):
    half = hosted(transport, runtime_dir)
    yield half
    half.close()


@pytest.fixture
def pair(transport, host, runtime_dir):
    """A ring of SHAPE with slot 0 given to sequence 3, and a guest that is attached to it."""
    view = host.create_ring(SHAPE)
    host.offer(NONCE, LIFE)
    guest = attach(transport, host, runtime_dir, SHAPE)
    view.claim(0, 3)
    both = [view, guest]
    yield both
    guest.close()
    both.clear()  # pytest keeps the list until the check for mappings that are left has run


def test_the_folder_holds_transports_with_names_that_placement_knows():
    assert {"shared_memory", "local", "tcp"} <= TRANSPORTS.keys()
    names = [kind.name for kind in TRANSPORTS.values()]
    assert len(set(names)) == len(names)
    assert set(names) <= {rule.name for rule in RULES}
    assert all(issubclass(kind, FeatureTransport) for kind in TRANSPORTS.values())


def test_a_new_ring_is_zero_and_nobodys(host):
    view = host.create_ring(SHAPE)
    assert view.owner.tolist() == [-1, -1]
    assert view.written_high.tolist() == [0, 0]
    assert view.rows.shape == (2, 9, 6)
    assert not view.rows.any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_arrive_bit_for_bit(transport, host, runtime_dir, dtype):
    shape = plan(slots=1, window=5, widest_forward=4, row_width=6, dtype=dtype)
    view = host.create_ring(shape)
    host.offer(NONCE, LIFE)
    guest = attach(transport, host, runtime_dir, shape)
    view.claim(0, 8)
    write_forward(view, 0, 8, 0, 4)
    got = guest.read_rows(0, 8, 1, 4)
    assert got.start == 1
    assert torch.equal(got.rows, expected_rows(shape, 8, 1, 4))
    guest.close()


def test_the_rows_are_a_copy_that_later_forwards_do_not_touch(pair):
    view, guest = pair
    write_forward(view, 0, 3, 0, 4)
    got = guest.read_rows(0, 3, 0, 4)
    for base in range(4, 40, 4):
        write_forward(view, 0, 3, base, 4)
    assert torch.equal(got.rows, expected_rows(SHAPE, 3, 0, 4))


def test_a_prompt_of_three_times_the_capacity_can_be_ingested_chunk_by_chunk(pair):
    view, guest = pair
    seen = 0
    for base in range(0, 3 * SHAPE.capacity, 4):
        width = min(4, 3 * SHAPE.capacity - base)
        write_forward(view, 0, 3, base, width)
        got = guest.read_rows(0, 3, seen, base + width)
        assert got.start == seen
        assert torch.equal(got.rows, expected_rows(SHAPE, 3, seen, base + width))
        seen = base + width
    assert seen == 27


def test_without_ingest_a_long_prompt_leaves_its_last_capacity_of_rows_and_a_gap_before(pair):
    view, guest = pair
    for base in range(0, 3 * SHAPE.capacity, 3):
        write_forward(view, 0, 3, base, 3)
    got = guest.read_rows(0, 3, 0, 27)
    assert (got.start, got.start + got.rows.shape[0]) == (18, 27)
    assert torch.equal(got.rows, expected_rows(SHAPE, 3, 18, 27))


def test_a_reader_that_was_lapped_gets_nothing_instead_of_wrong_rows(pair):
    view, guest = pair
    for base in range(0, 40, 4):
        write_forward(view, 0, 3, base, 4)
    got = guest.read_rows(0, 3, 0, 20)
    assert got.start == 20
    assert got.rows.shape == (0, 6)


def test_a_rejected_block_is_not_read_and_its_rows_are_written_again(pair):
    view, guest = pair
    write_forward(view, 0, 3, 0, 4)
    view.announce(0, 6)
    view.rows[0, 4:6] = -1.0  # a block of two, of which nothing was kept
    assert guest.read_rows(0, 3, 2, 4).rows.shape[0] == 2
    write_forward(view, 0, 3, 4, 1)
    assert int(view.written_high[0]) == 6  # never goes back
    assert torch.equal(guest.read_rows(0, 3, 4, 5).rows, expected_rows(SHAPE, 3, 4, 5))


def test_a_slot_that_another_sequence_took_is_expired(pair):
    view, guest = pair
    write_forward(view, 0, 3, 0, 4)
    view.release(0)
    with pytest.raises(FeatureExpired, match="sequence -1, not to 3"):
        guest.read_rows(0, 3, 0, 4)
    view.claim(0, 4)
    with pytest.raises(FeatureExpired, match="sequence 4, not to 3"):
        guest.read_rows(0, 3, 0, 4)
    with pytest.raises(ProtocolError, match="0 of slot 0 are written"):
        guest.read_rows(0, 4, 0, 4)
    write_forward(view, 0, 4, 0, 2)
    assert torch.equal(guest.read_rows(0, 4, 0, 2).rows, expected_rows(SHAPE, 4, 0, 2))


def test_slots_do_not_disturb_each_other(pair):
    view, guest = pair
    view.claim(1, 9)
    for base in range(0, 24, 4):
        write_forward(view, 1, 9, base, 4)
    write_forward(view, 0, 3, 0, 4)
    assert torch.equal(guest.read_rows(0, 3, 0, 4).rows, expected_rows(SHAPE, 3, 0, 4))
    assert torch.equal(guest.read_rows(1, 9, 20, 24).rows, expected_rows(SHAPE, 9, 20, 24))


@pytest.mark.parametrize(
    ("slot", "start", "stop"), [(-1, 0, 1), (2, 0, 1), (0, 3, 2), (0, -1, 1), (0, 0, 5)]
)
def test_rows_that_cannot_be_meant_are_a_protocol_error(pair, slot, start, stop):
    view, guest = pair
    write_forward(view, 0, 3, 0, 4)
    with pytest.raises(ProtocolError):
        guest.read_rows(slot, 3, start, stop)


def test_no_rows_are_a_legal_question(pair):
    assert pair[1].read_rows(0, 3, 0, 0).rows.shape == (0, 6)


@pytest.mark.usefixtures("mapped")
def test_weights_are_shared_and_not_copied(transport, host, runtime_dir):
    host.create_ring(SHAPE)
    specs = {
        "embed": WeightSpec((10, 3), "bfloat16"),
        "head_t": WeightSpec((3, 10), "float32"),
    }
    ours = host.create_weights(specs)
    ours["embed"].fill_(2.0)
    host.offer(NONCE, LIFE)
    guest = attach(transport, host, runtime_dir, SHAPE)
    theirs = guest.weights()
    assert theirs.keys() == specs.keys()
    for name, spec in specs.items():
        assert theirs[name].shape == spec.shape
        assert theirs[name].dtype == getattr(torch, spec.dtype)
    assert theirs["embed"].eq(2.0).all()
    if transport.name not in COPIES_WEIGHTS:
        ours["head_t"].fill_(5.0)  # filled after the guest came: seen all the same
        assert theirs["head_t"].eq(5.0).all()
    least = 60 + 120 + SHAPE.slots * (16 + SHAPE.capacity * SHAPE.row_width * 4)
    most = least + 64 * 8 + EXTRAS.get(transport.name, 0)
    assert least <= guest.mapped_bytes() <= most
    guest.close()
    assert guest.mapped_bytes() == 0
    assert not guest.weights()


def test_no_weights_are_legal(transport, host, runtime_dir):
    host.create_ring(SHAPE)
    assert host.create_weights({}) == {}
    host.offer(NONCE, LIFE)
    guest = attach(transport, host, runtime_dir, SHAPE)
    assert guest.weights() == {}
    guest.close()


def test_a_ring_without_taps_carries_only_heights(transport, host, runtime_dir):
    shape = plan(slots=1, window=2, widest_forward=2, row_width=0, dtype="float32")
    view = host.create_ring(shape)
    host.offer(NONCE, LIFE)
    guest = attach(transport, host, runtime_dir, shape)
    view.claim(0, 1)
    view.announce(0, 2)
    assert guest.read_rows(0, 1, 0, 2).rows.shape == (2, 0)
    guest.close()


@pytest.mark.parametrize(("nonce", "life"), [(NONCE + 1, LIFE), (NONCE, LIFE + 1)])
def test_another_nonce_or_life_is_stale(transport, host, runtime_dir, nonce, life):
    host.create_ring(SHAPE)
    host.offer(NONCE, LIFE)
    with pytest.raises(StaleMessage, match=f"this is life {LIFE}"):
        attach(transport, host, runtime_dir, SHAPE, nonce=nonce, life=life)


def test_a_second_offer_replaces_nonce_and_life(transport, host, runtime_dir):
    host.create_ring(SHAPE)
    host.offer(NONCE, LIFE)
    host.offer(NONCE + 1, LIFE + 1)
    with pytest.raises(StaleMessage):
        attach(transport, host, runtime_dir, SHAPE)
    attach(transport, host, runtime_dir, SHAPE, nonce=NONCE + 1, life=LIFE + 1).close()


@pytest.mark.parametrize(
    "wrong",
    [
        RingShape(3, 5, 4, 6, "float32"),
        RingShape(2, 6, 4, 6, "float32"),
        RingShape(2, 5, 4, 7, "float32"),
        RingShape(2, 5, 4, 6, "bfloat16"),
    ],
)
def test_a_ring_of_another_shape_is_refused_with_both_shapes(transport, host, runtime_dir, wrong):
    host.create_ring(SHAPE)
    host.offer(NONCE, LIFE)
    with pytest.raises(TransportRefused, match=r"expected .*, found "):
        attach(transport, host, runtime_dir, wrong)


def test_how_a_capacity_splits_into_window_and_guard_is_the_targets_business(
    transport, host, runtime_dir
):
    host.create_ring(SHAPE)
    host.offer(NONCE, LIFE)
    attach(transport, host, runtime_dir, RingShape(2, 9, 0, 6, "float32")).close()


def test_several_guests_one_after_the_other_see_the_same_ring(pair, transport, host, runtime_dir):
    view, first = pair
    first.close()
    write_forward(view, 0, 3, 0, 4)
    again = attach(transport, host, runtime_dir, SHAPE)
    assert torch.equal(again.read_rows(0, 3, 0, 4).rows, expected_rows(SHAPE, 3, 0, 4))
    again.close()


def test_nobody_offers(transport, runtime_dir):
    address = address_of(transport, runtime_dir)
    with pytest.raises((TransportRefused, DeadlineExceeded), match=r"ring\.sock"):
        transport.attach(address, nonce=NONCE, life=LIFE, shape=SHAPE, timeout=0.3)


@pytest.mark.usefixtures("mapped")
def test_two_targets_cannot_offer_in_one_run_directory(transport, host, runtime_dir):
    host.create_ring(SHAPE)
    host.offer(NONCE, LIFE)
    second = transport.host(runtime_dir)
    second.create_ring(SHAPE)
    with pytest.raises(TransportRefused, match="another target"):
        second.offer(NONCE, LIFE)
    second.close()
    attach(transport, host, runtime_dir, SHAPE).close()  # the first still serves


def test_the_descriptor_is_quiet_while_no_guest_waits(transport, host):
    host.create_ring(SHAPE)
    with pytest.raises(InternalError, match="not been offered"):
        host.fileno()
    host.serve()
    host.offer(NONCE, LIFE)
    host.serve()
    assert not select.select([host.fileno()], [], [], 0)[0]


def test_allocating_twice_is_a_defect(host):
    host.create_ring(SHAPE)
    with pytest.raises(InternalError, match="twice"):
        host.create_ring(SHAPE)
    host.create_weights({"embed": WeightSpec((2, 2), "float32")})
    with pytest.raises(InternalError, match="twice"):
        host.create_weights({"embed": WeightSpec((2, 2), "float32")})


def test_a_closed_half_reads_nothing_and_closes_again(pair, host):
    _, guest = pair
    guest.close()
    guest.close()
    with pytest.raises(InternalError):
        guest.read_rows(0, 3, 0, 0)
    host.close()
    host.close()


class Interrupted:
    """Heights of a ring; the n-th look at them lets the writer do one of its steps first."""

    def __init__(self, heights, steps):
        self._heights = heights
        self._steps = list(steps)

    def __getitem__(self, slot):
        if self._steps:
            self._steps.pop(0)()
        return self._heights[slot]


def plain_ring(shape):
    return RingView(
        shape=shape,
        owner=torch.full((shape.slots,), -1),
        written_high=torch.zeros(shape.slots, dtype=torch.int64),
        rows=torch.zeros(shape.slots, shape.capacity, shape.row_width),
    )


def nothing():
    pass


def test_rows_that_are_overwritten_during_the_copy_are_dropped():
    view = plain_ring(SHAPE)
    view.claim(0, 3)
    for base in (0, 4):
        write_forward(view, 0, 3, base, 4)
    # The first look sees height 8; before the second one a forward reaches position 12.
    heights = Interrupted(view.written_high, [nothing, lambda: write_forward(view, 0, 3, 8, 4)])
    read = RingView(SHAPE, view.owner, heights, view.rows)
    got = read_whole(read, 0, 3, 0, 8)
    assert got.start == 12 - SHAPE.capacity
    assert torch.equal(got.rows, expected_rows(SHAPE, 3, 3, 8))


def test_a_slot_that_changes_hands_during_the_copy_is_expired():
    view = plain_ring(SHAPE)
    view.claim(0, 3)
    write_forward(view, 0, 3, 0, 4)
    heights = Interrupted(view.written_high, [nothing, lambda: view.claim(0, 4)])
    read = RingView(SHAPE, view.owner, heights, view.rows)
    with pytest.raises(FeatureExpired):
        read_whole(read, 0, 3, 0, 4)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    window=st.integers(1, 6),
    widest=st.integers(1, 5),
    forwards=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=12),
    during=st.lists(st.integers(1, 5), max_size=6),
    behind=st.integers(0, 30),
)
def test_whatever_is_read_is_right_and_whatever_is_missed_was_overwritten(
    window, widest, forwards, during, behind
):
    shape = plan(slots=1, window=window, widest_forward=widest, row_width=3, dtype="float32")
    view = plain_ring(shape)
    view.claim(0, 1)
    committed = 0
    for wanted, kept in forwards:
        width = min(wanted, widest)
        write_forward(view, 0, 1, committed, width)
        committed += min(kept, width)

    def decode():
        base = committed
        for wanted in during:
            write_forward(view, 0, 1, base, min(wanted, widest))
            base += min(wanted, widest)

    read = RingView(shape, view.owner, Interrupted(view.written_high, [nothing, decode]), view.rows)
    start = max(0, committed - behind)
    got = read_whole(read, 0, 1, start, committed)
    assert torch.equal(got.rows, expected_rows(shape, 1, got.start, committed))
    high = int(view.written_high[0])
    assert got.start == min(committed, max(start, high - shape.capacity))
