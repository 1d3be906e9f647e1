"""What the engine refuses, each time leaving the sequence as it was; slots and the ring."""

import pytest
import torch
from support.drive import generate, unpack
from support.engines import CHUNK, PROMPT, WIDTH, block, chunk, engine_over, opened, ready
from support.reference_loop import greedy
from support.toy_target import AttentionTarget

from protocol import errors
from protocol.feature_ring import plan
from protocol.messages import CloseItem, OpenItem, VerifyItem
from protocol.transports.base import RingView


def test_a_repeated_round_is_answered_with_its_verdict_and_computes_nothing():
    engine, target, first = ready()
    verdict = engine.verify(block([first, 1, 2]))
    ran = len(target.forwards)
    assert engine.verify(block([first, 1, 2])) is verdict
    assert len(target.forwards) == ran


def test_an_earlier_round_is_stale():
    engine, _, first = ready()
    verdict = engine.verify(block([first], number=5))
    with pytest.raises(errors.StaleMessage, match="round 4 is over"):
        engine.verify(block(unpack(verdict.tokens), base=verdict.committed, number=4))


@pytest.mark.parametrize("base", [0, len(PROMPT) - 1, len(PROMPT) + 1])
def test_a_block_at_another_position_than_committed_is_refused_with_both_numbers(base):
    engine, target, first = ready()
    ran = len(target.forwards)
    with pytest.raises(errors.PositionMismatch, match=rf"at {base}; {len(PROMPT)} positions"):
        engine.verify(block([first], base=base))
    assert len(target.forwards) == ran


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        ([], "block of 0 rows; 1 to 6 allowed"),
        ([None] + [1] * WIDTH, "block of 7 rows; 1 to 6 allowed"),
        ([39], "was chosen for that position"),
        ([None, 40], "token id 40 at position 11 is outside the vocabulary of 40"),
        (
            [None, 3, 2**31 - 1],
            "token id 2147483647 at position 12 is outside the vocabulary of 40",
        ),
    ],
)
def test_a_bad_block_is_refused_and_the_sequence_goes_on(ids, sentence):
    engine, target, first = ready()
    assert first != 39
    ran = len(target.forwards)
    with pytest.raises(errors.ProtocolError, match=sentence):
        engine.verify(block([first if token is None else token for token in ids]))
    assert len(target.forwards) == ran
    assert unpack(engine.verify(block([first])).tokens) == greedy(target, PROMPT, 2, slot=1)[1:]


def test_bytes_that_are_no_whole_ids_are_refused():
    engine, _, _ = ready()
    item = VerifyItem(sequence=1, round=1, base_pos=len(PROMPT), tokens=b"\0\0\0", budget=1)
    with pytest.raises(errors.ProtocolError, match="3 bytes of token ids"):
        engine.verify(item)


def test_nothing_can_be_verified_before_the_prompt_has_ended():
    engine = engine_over(AttentionTarget())
    engine.open(OpenItem(sequence=1))
    with pytest.raises(errors.ProtocolError, match="not prefilled"):
        engine.verify(block([0], base=0))


def test_a_chunk_that_does_not_start_at_committed_is_refused_with_both_numbers():
    engine, target = opened()
    engine.prefill(chunk(0, PROMPT[:4]))
    for start in (0, 8):
        with pytest.raises(errors.PositionMismatch, match=rf"at {start}; 4 positions"):
            engine.prefill(chunk(start, PROMPT[:4]))
    assert target.forwards == [4]


@pytest.mark.parametrize(("count", "last"), [(0, True), (3, False), (5, False), (5, True)])
def test_chunks_have_fixed_boundaries(count, last):
    engine, target = opened()
    with pytest.raises(errors.ProtocolError, match=f"chunk of {count} tokens at 0"):
        engine.prefill(chunk(0, PROMPT[:count], last=last))
    assert target.forwards == []


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers():
    engine, _ = opened(max_positions=6)
    engine.prefill(chunk(0, PROMPT[:4]))
    with pytest.raises(errors.PromptTooLong, match="at least 7 tokens; this target takes 6"):
        engine.prefill(chunk(4, PROMPT[4:7], last=True))


def test_the_context_can_be_used_to_its_last_position():
    text = greedy(AttentionTarget(max_positions=12), PROMPT, 3)
    engine, _, first = ready(AttentionTarget(max_positions=12))
    assert first == text[0]
    for number in (0, 1):
        item = block([text[number]], base=len(PROMPT) + number, number=number)
        assert unpack(engine.verify(item).tokens) == [text[number + 1]]
    with pytest.raises(errors.PromptTooLong, match="ends at position 13; this target takes 12"):
        engine.verify(block([text[2]], base=12, number=9))


def test_a_token_outside_the_vocabulary_is_refused_by_position():
    engine, target = opened()
    engine.prefill(chunk(0, PROMPT[:4]))
    with pytest.raises(errors.ProtocolError, match="token id 40 at position 5 is outside"):
        engine.prefill(chunk(4, [3, 40], last=True))
    assert target.forwards == [4]


def test_a_chunk_after_the_last_one_is_refused():
    engine, _, _ = ready()
    with pytest.raises(errors.ProtocolError, match="has ended already"):
        engine.prefill(chunk(len(PROMPT), [1], last=True))


def test_only_the_last_chunk_chooses_a_token():
    engine, _ = opened()
    result = engine.prefill(chunk(0, PROMPT[:4]))
    assert (result.token, result.committed, result.finish) == (-1, 4, "")


def test_a_full_target_is_overloaded_until_a_sequence_closes():
    engine = engine_over(AttentionTarget(slots=2))
    for number in (1, 2):
        engine.open(OpenItem(sequence=number))
    with pytest.raises(errors.Overloaded, match="all 2 slots"):
        engine.open(OpenItem(sequence=3))
    engine.close(CloseItem(sequence=1))
    assert engine.open(OpenItem(sequence=3)).slot == 0


def test_a_sequence_cannot_be_opened_twice():
    engine = engine_over(AttentionTarget())
    engine.open(OpenItem(sequence=1))
    with pytest.raises(errors.ProtocolError, match="open already"):
        engine.open(OpenItem(sequence=1))


def test_a_closed_sequence_never_computes_again():
    engine, target, first = ready()
    assert engine.close(CloseItem(sequence=1, keep=3)).committed == len(PROMPT)
    ran = len(target.forwards)
    for call, item in (
        (engine.verify, block([first])),
        (engine.prefill, chunk(0, PROMPT[:4])),
        (engine.close, CloseItem(sequence=1)),
    ):
        with pytest.raises(errors.UnknownSequence, match="sequence 1 is not open"):
            call(item)
    with pytest.raises(errors.StaleMessage, match="never computes again"):
        engine.open(OpenItem(sequence=1))
    assert len(target.forwards) == ran


def test_a_reused_slot_gives_the_text_of_a_fresh_one():
    engine = engine_over(AttentionTarget(slots=1))
    generate(engine, [30, 3, 17, 22, 9, 9], 20, chunk=CHUNK, sequence=1)
    text, *_ = generate(engine, PROMPT, 20, chunk=CHUNK, sequence=2)
    assert text == greedy(AttentionTarget(), PROMPT, 20)


def test_ring_rows_belong_to_the_open_sequence_and_to_nobody_afterwards():
    shape = plan(slots=2, window=8, widest_forward=WIDTH, row_width=2, dtype="float32")
    ring = RingView(
        shape,
        owner=torch.full((2,), -1),
        written_high=torch.tensor([99, 99]),
        rows=torch.zeros(2, shape.capacity, 2),
    )
    engine = engine_over(AttentionTarget(), ring=ring)
    engine.open(OpenItem(sequence=77))
    engine.open(OpenItem(sequence=78))
    assert ring.owner.tolist() == [77, 78]
    assert ring.written_high.tolist() == [0, 0]
    engine.close(CloseItem(sequence=77))
    assert ring.owner.tolist() == [-1, 78]
