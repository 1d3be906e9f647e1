"""Which answer belongs to which message of one daemon."""

import pytest

from launch.deadlines_heap import Timer
from launch.meeting import check_hello, check_pair, check_target
from launch.peer import Peer
from launch.process import Child
from protocol.config import Deadlines
from protocol.errors import DraftMismatch, InternalError, ProtocolError, WireMismatch
from protocol.messages import (
    WIRE_VERSION,
    Close,
    Closed,
    ClosedItem,
    CloseItem,
    DraftHello,
    Failed,
    Hello,
    HostFacts,
    Open,
    Opened,
    OpenedItem,
    OpenItem,
    Pair,
    Paired,
)

LIVES = {"target_life": 4, "draft_life": 6}


class Wire:
    """Takes what is sent."""

    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(message)


@pytest.fixture
def peer():
    made = Peer("draft", 6, Child(("true",), deadlines=Deadlines()), "ipc://nowhere")
    made._link = Wire()
    return made


def sent(peer, message, when=1.0):
    peer.send(message).timer = Timer(when, None)
    return message


def opening(*sequences):
    return Open(items=tuple(OpenItem(sequence=n, round=1, slot=0) for n in sequences), **LIVES)


def opened(*sequences, round_number=1, **lives):
    items = tuple(OpenedItem(sequence=n, round=round_number, slot=0) for n in sequences)
    return Opened(results=items, **(LIVES | lives))


def test_an_answer_names_the_same_sequences_rounds_and_lives(peer):
    message = sent(peer, opening(1, 2))
    for wrong in (
        opened(1),
        opened(2, 1),
        opened(1, 2, round_number=2),
        opened(1, 2, target_life=5),
        opened(1, 2, draft_life=5),
        Closed(results=(ClosedItem(sequence=1, round=1, committed=0),) * 2, **LIVES),
    ):
        assert peer.take(wrong) is None
    assert peer.num_stale_replies == 6
    assert peer.take(opened(1, 2)).message is message
    assert peer.take(opened(1, 2)) is None


def test_an_answer_may_come_although_an_earlier_one_was_lost(peer):
    sent(peer, opening(1))
    second = sent(peer, Close(items=(CloseItem(sequence=9, round=3),), **LIVES))
    answer = Closed(results=(ClosedItem(sequence=9, round=3, committed=0),), **LIVES)
    assert peer.take(answer).message is second


def test_a_refusal_names_no_sequence_and_belongs_to_the_oldest_message(peer):
    first = sent(peer, opening(1))
    sent(peer, opening(2))
    assert peer.take(Failed(code="internal", detail="", **LIVES)).message is first


def test_pairing_is_answered_by_paired(peer):
    message = Pair(
        transport="shm",
        address="a",
        ring_nonce=1,
        slots=1,
        ring_capacity=1,
        dtype="float32",
        hidden_size=1,
        padded_vocab_size=1,
        vocab_size=1,
        embedding_scale=1.0,
        logit_scale=1.0,
        logit_softcap=0.0,
        **LIVES,
    )
    sent(peer, message)
    answer = Paired(transport="shm", mapped_bytes=0, seconds=0.0, **LIVES)
    assert peer.take(answer).message is message


def test_the_latest_deadline_is_of_all_that_is_due(peer):
    assert peer.latest_deadline == 0.0
    for when in (3.0, 8.0, 5.0):
        sent(peer, opening(int(when)), when)
    assert peer.latest_deadline == 8.0
    assert len(peer.forget_sent()) == 3
    assert peer.latest_deadline == 0.0


def test_a_peer_that_was_not_started_has_no_link_and_ends_at_once():
    peer = Peer("draft", 6, Child(("true",), deadlines=Deadlines()), "ipc://nowhere")
    peer.close()
    assert peer.status().pid is None
    with pytest.raises(InternalError):
        _ = peer.link


HOST = HostFacts(
    pid=1, boot_id="", pid_namespace="", ipc_namespace="", device="cpu", threads=1, versions={}
)
DRAFT = {
    "wire_version": WIRE_VERSION,
    "nonce": 11,
    "host": HOST,
    "network": "n",
    "dtype": "float32",
    "hidden_size": 32,
    "vocab_size": 9,
    "target_layer_ids": (1, 2),
    "mask_token_id": 3,
    "block_size": 4,
    "sample_from_anchor": False,
    "context_window": 8,
    "slots": 1,
    "load_seconds": 0.0,
    "weight_bytes": 0,
}


def test_a_hello_of_another_wire_version_or_nonce_is_refused_with_both_values():
    asked = Hello(wire_version=WIRE_VERSION, nonce=11, **LIVES)
    check_hello(asked, DraftHello(**DRAFT, **LIVES), "draft")
    with pytest.raises(WireMismatch, match=f"{WIRE_VERSION + 1}.*{WIRE_VERSION}"):
        check_hello(
            asked, DraftHello(**(DRAFT | {"wire_version": WIRE_VERSION + 1}), **LIVES), "draft"
        )
    with pytest.raises(ProtocolError, match="another Hello"):
        check_hello(asked, DraftHello(**(DRAFT | {"nonce": 12}), **LIVES), "draft")


class Facts:
    taps, hidden_size, mask_token_id = (1, 2), 32, 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target_layer_ids": (1, 3)}, r"\(1, 2\).*\(1, 3\)"),
        ({"hidden_size": 48}, "32.*48"),
        ({"mask_token_id": 7}, "3.*7"),
    ],
)
def test_a_loaded_draft_for_another_target_is_refused_with_both_values(change, words):
    check_pair(Facts, DraftHello(**DRAFT, **LIVES))
    with pytest.raises(DraftMismatch, match=words):
        check_pair(Facts, DraftHello(**(DRAFT | change), **LIVES))


class Numbers:
    slots, vocab_size, max_positions, prefill_chunk, max_width = 1, 1, 2, 8, 4
    ring_capacity, taps = 8, (1,)


@pytest.mark.parametrize(
    "name",
    ["slots", "vocab_size", "max_positions", "prefill_chunk", "max_width", "ring_capacity"],
)
def test_a_target_that_states_impossible_numbers_is_refused(name):
    check_target(Numbers)
    with pytest.raises(ProtocolError, match=name):
        check_target(type("Less", (Numbers,), {name: 0}))
