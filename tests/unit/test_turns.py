"""Who computes next."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.turns import BATCH, Turns, shares_cores
from protocol.messages import HostFacts, IngestItem, PrefillItem, ProposeItem, VerifyItem

CPU = HostFacts(
    pid=1, boot_id="b", pid_namespace="p", ipc_namespace="i", device="cpu", threads=1, versions={}
)


def verify(sequence):
    return VerifyItem(sequence=sequence, base_pos=1, tokens=b"\0\0\0\0", budget=1)


def propose(sequence):
    return ProposeItem(sequence=sequence, base_pos=1, pending=1, width=2)


def prefill(sequence):
    return PrefillItem(sequence=sequence, start=0, tokens=b"\0\0\0\0", last=True)


def sequences(batches):
    return [(batch.role, [item.sequence for item in batch.items]) for batch in batches]


def test_daemons_that_share_cores_compute_one_after_the_other():
    turns = Turns()
    turns.ask("target", verify(1))
    turns.ask("draft", propose(2))
    assert sequences(turns.grant()) == [("target", [1])]
    assert turns.grant() == []
    turns.done("target")
    assert sequences(turns.grant()) == [("draft", [2])]


def test_daemons_with_cores_of_their_own_compute_at_the_same_time():
    turns = Turns()
    turns.shared = False
    turns.ask("target", verify(1))
    turns.ask("draft", propose(2))
    turns.ask("target", verify(3))
    assert sequences(turns.grant()) == [("target", [1, 3]), ("draft", [2])]
    turns.ask("target", verify(4))
    assert turns.grant() == []


def test_requests_of_one_verb_ride_in_one_message_up_to_its_bound():
    turns = Turns()
    for sequence in range(12):
        turns.ask("target", verify(sequence))
        turns.ask("draft", propose(sequence))
    assert sequences(turns.grant()) == [("target", list(range(BATCH[VerifyItem])))]
    turns.done("target")
    assert sequences(turns.grant()) == [("draft", list(range(BATCH[ProposeItem])))]


def test_a_long_prompt_does_not_bring_other_prompts_along():
    turns = Turns()
    turns.ask("target", prefill(1))
    turns.ask("target", prefill(2))
    turns.ask("target", verify(3))
    granted = []
    for _ in range(3):
        granted += sequences(turns.grant())
        turns.done("target")
    assert granted == [("target", [1]), ("target", [2]), ("target", [3])]


def test_a_cancelled_request_loses_its_place_and_nobody_elses():
    turns = Turns()
    turns.ask("target", verify(1))
    turns.ask("draft", propose(1))
    turns.ask("target", verify(2))
    turns.drop("target", 1)
    assert sequences(turns.grant()) == [("draft", [1])]


def test_a_dead_daemon_frees_its_turn():
    turns = Turns()
    turns.ask("draft", propose(1))
    turns.grant()
    turns.ask("draft", propose(2))
    turns.ask("target", verify(1))
    turns.clear("draft")
    assert sequences(turns.grant()) == [("target", [1])]


def test_cores_are_shared_on_one_machine_and_one_device():
    other = msgspec.structs.replace(CPU, pid=2)
    assert shares_cores(CPU, other)
    assert not shares_cores(CPU, msgspec.structs.replace(other, boot_id="c"))
    assert not shares_cores(CPU, msgspec.structs.replace(other, device="cuda:GPU-1"))


MAKERS = [prefill, verify, propose, lambda n: IngestItem(sequence=n, stop=1)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=30), st.booleans())
def test_everything_asked_is_granted_once_and_at_most_one_message_is_out(asked, shared):
    turns = Turns()
    turns.shared = shared
    for kind, sequence in asked:
        turns.ask("target" if kind < 2 else "draft", MAKERS[kind](sequence))
    granted = []
    while batches := turns.grant():
        assert len(batches) == 1 or not shared
        for batch in batches:
            assert {type(item) for item in batch.items} == {batch.kind}
            granted += [(type(item), item.sequence) for item in batch.items]
            turns.done(batch.role)
    kinds = [type(MAKERS[kind](0)) for kind in range(4)]
    assert sorted((kinds.index(kind), number) for kind, number in granted) == sorted(asked)


def test_the_other_daemon_goes_on_beside_one_that_is_late():
    turns = Turns()
    turns.ask("draft", propose(1))
    turns.ask("target", verify(2))
    assert [batch.role for batch in turns.grant()] == ["draft"]
    turns.ask("draft", propose(3))
    assert not turns.is_overdue("draft")
    assert [item.sequence for item in turns.overdue("draft")] == [3]
    assert turns.is_overdue("draft")
    assert [batch.role for batch in turns.grant()] == ["target"]
    turns.ask("draft", propose(4))
    turns.done("target")
    assert turns.grant() == []  # the late one is still at work
    turns.done("draft")
    assert not turns.is_overdue("draft")
    assert [batch.role for batch in turns.grant()] == ["draft"]


def test_a_sequence_that_must_be_alone_shares_no_message():
    turns = Turns()
    turns.alone.add(2)
    for number in (1, 2, 3):
        turns.ask("target", verify(number))
    batches = []
    while found := turns.grant():
        batches += [tuple(item.sequence for item in batch.items) for batch in found]
        turns.done("target")
    assert batches == [(1, 3), (2,)]


def test_what_waits_for_a_daemon_can_be_forgotten_without_ending_its_turn():
    turns = Turns()
    turns.ask("draft", propose(1))
    turns.grant()
    turns.ask("draft", propose(2))
    turns.drop_all("draft")
    assert turns.grant() == []
    turns.done("draft")
    assert turns.grant() == []
