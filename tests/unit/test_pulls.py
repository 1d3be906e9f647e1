"""Pulling rows over a socket: what an answer may be, what becomes of it when it is not that."""

import threading

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import messages as generated
from support.keys import keyring, stranger
from support.ring_peers import LIFE, NONCE, Pulled, expected_rows, write_forward

from protocol.addresses import TcpAddress
from protocol.errors import (
    DaemonError,
    DeadlineExceeded,
    FeatureExpired,
    InternalError,
    PermissionRefused,
    ProtocolError,
    TransportRefused,
)
from protocol.feature_ring import RingShape, plan
from protocol.listening import Network
from protocol.messages import (
    MAX_RAW_BYTES,
    Attached,
    Embedded,
    Projected,
    RowsSent,
)
from protocol.messages import Rows as RowsWanted
from protocol.state import FEATURE_REPLIES
from protocol.transports.base import Terms
from protocol.transports.connection import IN_FLIGHT
from protocol.transports.plain import PlainHost
from protocol.transports.tcp import TRANSPORT, RowsDesk, rows_per_frame

WIDE = 40000  # float32 elements: three rows in a frame
SHAPE = plan(slots=1, window=40, widest_forward=20, row_width=WIDE, dtype="float32")
SMALL = plan(slots=2, window=40, widest_forward=20, row_width=6, dtype="float32")


class Bench:
    """A ring with one sequence and a guest that pulls from it."""

    def __init__(self, run_dir, shape=SMALL, *, pull=0.5, network=None, ring=None):
        self.host = Pulled(PlainHost(), run_dir, network=network)
        self.view = self.host.create_ring(shape)
        self.host.offer(NONCE, LIFE)
        self.view.claim(0, 3)
        self.guest = None
        self._address = self.host.endpoint
        self._terms, self._shape = Terms(ring, pull), shape

    def attach(self, timeout=5.0):
        self.guest = TRANSPORT.reach(
            self._address, self._terms, nonce=NONCE, life=LIFE, shape=self._shape, timeout=timeout
        )
        return self.guest

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.guest is not None:
            self.guest.close()
        self.host.close()


@pytest.fixture
def bench(runtime_dir):
    with Bench(runtime_dir) as bench:
        bench.attach()
        yield bench


def counts(bench):
    return [message.count for message in bench.host.handled]


def test_many_rows_come_in_frames_of_512_kib_and_several_are_under_way(runtime_dir):
    with Bench(runtime_dir, SHAPE, pull=10.0) as bench:
        guest = bench.attach()
        for base in range(0, 40, 10):
            write_forward(bench.view, 0, 3, base, 10)
        got = guest.read_rows(0, 3, 0, 40)
        assert torch.equal(got.rows, expected_rows(SHAPE, 3, 0, 40))
        assert counts(bench) == [3] * 13 + [1]
        assert len(counts(bench)) > IN_FLIGHT
        assert guest.moved_bytes > 40 * WIDE * 4


def test_rows_that_are_overwritten_between_two_frames_leave_a_gap_and_no_wrong_row(runtime_dir):
    with Bench(runtime_dir, SHAPE, pull=10.0) as bench:
        guest = bench.attach()
        for base in range(0, 40, 10):
            write_forward(bench.view, 0, 3, base, 10)

        def overwrite(message):
            if message.start == 12:
                for base in range(40, 80, 10):
                    write_forward(bench.view, 0, 3, base, 10)

        bench.host.on_pull = overwrite
        got = guest.read_rows(0, 3, 0, 40)
        assert got.start == 20  # 80 written, 60 fit
        assert torch.equal(got.rows, expected_rows(SHAPE, 3, 20, 40))


def test_more_rows_than_the_ring_holds_are_not_asked_for(bench):
    for base in range(0, 200, 20):
        write_forward(bench.view, 0, 3, base, 20)
    got = bench.guest.read_rows(0, 3, 0, 200)
    assert got.start == 200 - SMALL.capacity
    assert sum(counts(bench)) == SMALL.capacity


def test_a_refusal_in_the_middle_is_raised_when_all_is_answered_and_the_next_pull_works(bench):
    write_forward(bench.view, 0, 3, 0, 4)
    with pytest.raises(FeatureExpired):
        bench.guest.read_rows(0, 4, 0, 4)
    before = bench.guest.moved_bytes
    assert torch.equal(bench.guest.read_rows(0, 3, 0, 4).rows, expected_rows(SMALL, 3, 0, 4))
    assert bench.guest.moved_bytes > before


def test_an_answer_that_is_late_ends_the_connection_and_the_next_pull_makes_another(bench):
    write_forward(bench.view, 0, 3, 0, 4)
    go_on = threading.Event()
    bench.host.on_pull = lambda message: go_on.wait(10) and None
    with pytest.raises(DeadlineExceeded, match=r"no answer to Rows from ipc://.* within 0\.5 s"):
        bench.guest.read_rows(0, 3, 0, 4)
    bench.host.on_pull = lambda message: None
    go_on.set()
    assert torch.equal(bench.guest.read_rows(0, 3, 0, 4).rows, expected_rows(SMALL, 3, 0, 4))


def test_a_target_of_another_life_has_none_of_the_rows(bench):
    write_forward(bench.view, 0, 3, 0, 4)
    bench.host.offer(NONCE, LIFE + 1)
    for _ in range(2):
        with pytest.raises(FeatureExpired):
            bench.guest.read_rows(0, 3, 0, 4)


def test_a_target_that_has_other_weights_than_before_is_another(bench):
    write_forward(bench.view, 0, 3, 0, 4)
    bench.host.weights_hash = "other"
    bench.host.offer(NONCE, LIFE)  # a new process: the guest must attach again
    with pytest.raises((FeatureExpired, ProtocolError)):
        bench.guest.read_rows(0, 3, 0, 4)
    with pytest.raises(FeatureExpired, match="other weights"):
        bench.guest.read_rows(0, 3, 0, 4)


WRONG = {
    "of another pull": lambda asked: {"pull": asked.pull + 1},
    "rows from before": lambda asked: {"start": max(0, asked.start - 1)},
    "rows from behind": lambda asked: {"start": asked.start + asked.count + 1},
    "too few bytes": lambda asked: {"raw": b"\0" * 4},
    "too many bytes": lambda asked: {"raw": b"\0" * (6 * 4 * 4 + 4)},
    "bytes that are no whole element": lambda asked: {"raw": b"\0" * 95},
}


@pytest.mark.parametrize("what", WRONG)
def test_an_answer_that_cannot_be_true_is_a_protocol_error_and_ends_the_connection(bench, what):
    write_forward(bench.view, 0, 3, 0, 5)

    def wrong(asked):
        right = RowsSent(
            target_life=LIFE, pull=asked.pull, start=asked.start, raw=bytes(4 * 6 * asked.count)
        )
        return msgspec.structs.replace(right, **WRONG[what](asked))

    bench.host.on_pull = wrong
    with pytest.raises(ProtocolError):
        bench.guest.read_rows(0, 3, 1, 5)
    bench.host.on_pull = lambda message: None
    assert torch.equal(bench.guest.read_rows(0, 3, 1, 5).rows, expected_rows(SMALL, 3, 1, 5))


def test_an_answer_of_another_kind_is_a_protocol_error(bench):
    write_forward(bench.view, 0, 3, 0, 4)
    bench.host.on_pull = lambda asked: Projected(target_life=LIFE, pull=asked.pull, tokens=b"")
    with pytest.raises(ProtocolError, match="answered Projected out of order"):
        bench.guest.read_rows(0, 3, 0, 4)


def test_ids_and_embeddings_that_are_not_as_many_as_asked_are_a_protocol_error(bench):
    bench.host.on_pull = lambda asked: Projected(target_life=LIFE, pull=asked.pull, tokens=b"")
    with pytest.raises(ProtocolError, match="0 ids for 2 hidden rows"):
        bench.guest.project(torch.zeros(2, 4))
    bench.host.on_pull = lambda asked: Embedded(target_life=LIFE, pull=asked.pull, raw=bytes(9))
    with pytest.raises(ProtocolError, match="9 bytes for rows of 8"):
        bench.guest.embed((1, 2))


def test_a_message_that_is_no_answer_to_attach_is_a_protocol_error(runtime_dir):
    with Bench(runtime_dir) as bench:
        bench.host._handle = lambda asked, offered: RowsSent(
            target_life=LIFE, pull=0, start=0, raw=b""
        )
        with pytest.raises(ProtocolError, match="RowsSent to Attach"):
            bench.attach()


def test_over_a_network_the_drafts_own_key_is_needed(runtime_dir):
    network = Network(TcpAddress("127.0.0.1", 0), keyring("target"))
    for ring, error in (
        (stranger(), "does not admit this process's key"),
        (None, "only one of the two uses keys"),
    ):
        with (
            Bench(runtime_dir, network=network, ring=ring) as bench,
            pytest.raises(PermissionRefused, match=error),
        ):
            bench.attach()
    with Bench(runtime_dir, network=network, ring=keyring("draft")) as bench:
        guest = bench.attach()
        write_forward(bench.view, 0, 3, 0, 4)
        assert torch.equal(guest.read_rows(0, 3, 0, 4).rows, expected_rows(SMALL, 3, 0, 4))


def test_a_row_that_fits_no_frame_is_refused_before_anything_is_sent():
    assert rows_per_frame(MAX_RAW_BYTES) == 1
    with pytest.raises(TransportRefused, match=str(MAX_RAW_BYTES + 1)):
        rows_per_frame(MAX_RAW_BYTES + 1)


def test_a_guest_says_what_it_has_not(bench):
    assert bench.guest.weights() == {}
    assert bench.guest.mapped_bytes() == 0
    assert isinstance(bench.guest.remote.facts, Attached)
    bench.guest.close()
    with pytest.raises(InternalError):
        bench.guest.read_rows(0, 3, 0, 0)


@pytest.fixture(scope="module")
def desk():
    shape = RingShape(2, 12, 0, 6, "float32")
    host = PlainHost()
    view = host.create_ring(shape)
    view.claim(0, 3)
    for base in range(0, 30, 3):
        write_forward(view, 0, 3, base, 3)
    yield RowsDesk(view), shape
    host.close()


@settings(max_examples=300, deadline=None)
@given(
    slot=st.integers(-1, 4095) | st.integers(0, 1),
    sequence=st.integers(0, (1 << 63) - 1) | st.just(3),
    start=st.integers(0, (1 << 31) - 1) | st.integers(0, 31),
    count=st.integers(0, (1 << 31) - 1) | st.integers(0, 40),
)
def test_whatever_is_asked_for_is_answered_with_right_rows_or_a_typed_error(
    desk, slot, sequence, start, count
):
    desk, shape = desk
    asked = RowsWanted(
        target_life=LIFE, pull=9, slot=slot, sequence=sequence, start=start, count=count
    )
    try:
        sent = desk.rows(asked)
    except (ProtocolError, FeatureExpired):
        return
    assert (slot, sequence, sent.pull) == (0, 3, 9)
    assert start <= sent.start <= start + count <= 30
    rows = expected_rows(shape, 3, sent.start, start + count)
    assert sent.raw == rows.numpy().tobytes()


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    answer=st.one_of([generated.message(kind) for kind in FEATURE_REPLIES]),
    keep=st.booleans(),
)
def test_whatever_a_target_answers_gives_rows_of_the_right_shape_or_a_typed_error(
    bench, answer, keep
):
    def hostile(asked):
        fields = {"target_life": LIFE, "draft_life": 0}
        if keep and hasattr(answer, "pull"):
            fields["pull"] = asked.pull
        return msgspec.structs.replace(answer, **fields)

    bench.host.on_pull = hostile
    try:
        got = bench.guest.read_rows(0, 3, 2, 4)
    except DaemonError:
        return
    assert got.rows.shape == (4 - got.start, 6)
    assert 2 <= got.start <= 4
