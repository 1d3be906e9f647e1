"""The engine over small real targets: text, both ways back, refusals, and undone failures."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drive import generate, pack, prefill, unpack
from support.reference_loop import acceptances, greedy
from support.toy_target import AttentionTarget, FailingTarget, RecurrentTarget

from protocol import errors
from protocol.feature_ring import plan
from protocol.messages import CloseItem, OpenItem, PrefillItem, Sampling, VerifyItem
from protocol.transports.base import RingView
from target_daemon.engine import Engine, Limits

PROMPT = [1, 5, 9, 2, 7, 33, 20, 4, 4, 8]
END = len(PROMPT)
CHUNK, WIDTH = 4, 6
KINDS = [AttentionTarget, RecurrentTarget]


def engine_over(target, *, rollback="fast", ring=None):
    return Engine(target, Limits(CHUNK, WIDTH, rollback), ring)


def oracle(text, prompt, *, right):
    """A drafter that knows the text and proposes `right` of its tokens before a wrong one."""

    def draft(so_far, wanted):
        done = len(so_far) - len(prompt)
        tokens = (text[done : done + wanted] + [0] * wanted)[:wanted]
        return [t if i < right else (t + 1) % 40 for i, t in enumerate(tokens)]

    return draft


def guesser(seed, text, prompt):
    """A drafter that is right about three times in four, at random places."""
    source = random.Random(seed)

    def draft(so_far, wanted):
        done = len(so_far) - len(prompt)
        tokens = (text[done : done + wanted] + [0] * wanted)[:wanted]
        return [t if source.random() < 0.75 else source.randrange(40) for t in tokens]

    return draft


def ready(target=None, *, sequence=1, sampling=None, **options):
    """An engine with one prefilled sequence; returns (engine, target, first token)."""
    target = target or AttentionTarget()
    engine = engine_over(target, **options)
    engine.open(OpenItem(sequence=sequence, sampling=sampling or Sampling()))
    return engine, target, prefill(engine, sequence, PROMPT, CHUNK).token


def block(ids, *, base=END, number=1, budget=50, sequence=1):
    return VerifyItem(
        sequence=sequence, round=number, base_pos=base, tokens=pack(ids), budget=budget
    )


# --- the text ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rollback", ["fast", "replay"])
@pytest.mark.parametrize("right", [0, 1, 3, 5])
def test_the_text_does_not_depend_on_the_drafts(kind, rollback, right):
    target = kind()
    text = greedy(kind(), PROMPT, 40)
    drafter = oracle(text, PROMPT, right=right)
    engine = engine_over(target, rollback=rollback)
    got, rounds, finish = generate(engine, PROMPT, 40, chunk=CHUNK, width=WIDTH, drafter=drafter)
    assert (got, finish) == (text, "length")
    assert rounds == acceptances(text, PROMPT, WIDTH, drafter, 40)


@pytest.mark.parametrize("kind", KINDS)
def test_autoregressive_text_equals_the_reference_loop(kind):
    text, rounds, _ = generate(engine_over(kind()), PROMPT, 40, chunk=CHUNK)
    assert text == greedy(kind(), PROMPT, 40)
    assert rounds == [1] * 39


@given(seed=st.integers(0, 10**6), cut=st.integers(1, len(PROMPT)), kind=st.sampled_from(KINDS))
@settings(max_examples=25, deadline=None)
def test_both_ways_back_leave_the_same_state_and_text(seed, cut, kind):
    prompt = PROMPT[:cut]
    text = greedy(kind(seed=seed), prompt, 20)
    states = {}
    for rollback in ("fast", "replay"):
        target = kind(seed=seed)
        engine = engine_over(target, rollback=rollback)
        assert engine.rollback == rollback
        drafter = guesser(seed, text, prompt)
        got, rounds, _ = generate(
            engine, prompt, 20, chunk=CHUNK, width=WIDTH, drafter=drafter, close=False
        )
        assert got == text
        states[rollback] = (rounds, target.state(0, len(prompt) + 19))
    assert states["fast"][0] == states["replay"][0]
    torch.testing.assert_close(states["fast"][1], states["replay"][1], rtol=0, atol=1e-12)


def test_replay_runs_the_kept_rows_again_and_only_where_rows_were_rejected():
    text = greedy(AttentionTarget(), PROMPT, 40)
    engine, target, first = ready(rollback="replay")
    del target.forwards[:]
    engine.verify(block([first, *text[1:4]], number=1))
    assert target.forwards == [4]
    wrong = [(text[6] + 1) % 40, 0]
    engine.verify(block([text[4], text[5], *wrong], base=len(PROMPT) + 4, number=2))
    assert target.forwards == [4, 4, 2]


def test_a_target_without_fast_rollback_is_replayed():
    target = RecurrentTarget(fast=False)
    text = greedy(RecurrentTarget(), PROMPT, 20)
    engine = engine_over(target, rollback="fast")
    assert engine.rollback == "replay"
    drafter = guesser(1, text, PROMPT)
    assert generate(engine, PROMPT, 20, chunk=CHUNK, width=WIDTH, drafter=drafter)[0] == text


@pytest.mark.parametrize("failure", [False, RuntimeError("the states are gone")])
def test_a_failed_fast_rollback_becomes_restore_and_replay(failure, monkeypatch):
    text = greedy(RecurrentTarget(), PROMPT, 20)
    target = RecurrentTarget()

    def rollback_to(slot, base_pos, n):
        if isinstance(failure, BaseException):
            raise failure
        return failure

    monkeypatch.setattr(target, "rollback_to", rollback_to)
    drafter = guesser(2, text, PROMPT)
    got, *_ = generate(engine_over(target), PROMPT, 20, chunk=CHUNK, width=WIDTH, drafter=drafter)
    assert got == text


def test_two_interleaved_sequences_do_not_touch_each_other():
    target = AttentionTarget()
    engine = engine_over(target)
    other = [30, 3, 3, 17, 6]
    texts = {1: greedy(AttentionTarget(), PROMPT, 20), 2: greedy(AttentionTarget(), other, 20)}
    prompts = {1: PROMPT, 2: other}
    slots = [engine.open(OpenItem(sequence=n)).slot for n in (1, 2)]
    assert sorted(slots) == [0, 1]
    got = {n: [prefill(engine, n, prompts[n], CHUNK).token] for n in (1, 2)}
    for number in range(1, 20):
        for n in (1, 2):
            if len(got[n]) == 20:
                continue
            rows = min(1 + number % 3, 20 - len(got[n]))
            drafts = guesser(number, texts[n], prompts[n])([*prompts[n], *got[n]], rows - 1)
            base = len(prompts[n]) + len(got[n]) - 1
            item = block(
                [got[n][-1], *drafts], base=base, number=number, budget=20 - len(got[n]), sequence=n
            )
            got[n] += unpack(engine.verify(item).tokens)
    assert got == texts


# --- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, WIDTH])
@pytest.mark.parametrize("source", ["eos", "stop_token_ids"])
def test_a_stop_token_ends_the_text_wherever_it_falls_in_a_block(width, source):
    whole = greedy(AttentionTarget(), PROMPT, 30)
    for stop in dict.fromkeys(whole):
        text = whole[: whole.index(stop) + 1]
        eos, ids = ((stop,), ()) if source == "eos" else ((), (stop,))
        engine = engine_over(AttentionTarget(eos=eos))
        got, _, finish = generate(
            engine,
            PROMPT,
            30,
            chunk=CHUNK,
            width=width,
            drafter=oracle(whole, PROMPT, right=5),
            sampling=Sampling(stop_token_ids=ids),
        )
        assert (got, finish) == (text, "stop")


def test_eos_is_an_ordinary_token_when_it_is_ignored():
    text = greedy(AttentionTarget(), PROMPT, 30)
    engine = engine_over(AttentionTarget(eos=tuple(text)))
    got, _, finish = generate(engine, PROMPT, 30, chunk=CHUNK, sampling=Sampling(ignore_eos=True))
    assert (got, finish) == (text, "length")


def test_a_finished_sequence_refuses_another_round():
    first = greedy(AttentionTarget(), PROMPT, 1)
    engine, target, token = ready(AttentionTarget(eos=tuple(first)))
    assert [token] == first
    ran = len(target.forwards)
    with pytest.raises(errors.ProtocolError, match="has ended"):
        engine.verify(block([token]))
    assert len(target.forwards) == ran


# --- repeated and foreign messages ---------------------------------------------------------------


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


# --- prefill -------------------------------------------------------------------------------------


def chunk(start, ids, *, last=False, sequence=1):
    return PrefillItem(sequence=sequence, start=start, tokens=pack(ids), last=last)


def opened(**options):
    target = AttentionTarget(**options)
    engine = engine_over(target)
    engine.open(OpenItem(sequence=1))
    return engine, target


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


# --- slots and the ring --------------------------------------------------------------------------


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


# --- failures ------------------------------------------------------------------------------------

NO_MEMORY = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes")


@pytest.mark.parametrize("error", [NO_MEMORY, MemoryError(), RuntimeError("shape mismatch")])
@pytest.mark.parametrize("rollback", ["fast", "replay"])
def test_a_failed_verify_is_undone_and_tried_at_width_1(error, rollback):
    text = greedy(AttentionTarget(), PROMPT, 20)
    target = FailingTarget()
    target.failures = {4: error}  # three chunks of prompt, a good round, then this one
    engine = engine_over(target, rollback=rollback)
    got, rounds, _ = generate(
        engine, PROMPT, 20, chunk=CHUNK, width=WIDTH, drafter=oracle(text, PROMPT, right=5)
    )
    assert got == text
    assert rounds == [6, 1, 6, 6]
    assert target.failures == {}


@pytest.mark.parametrize(
    ("error", "kind", "sentence"),
    [
        (NO_MEMORY, errors.OutOfMemory, "no memory for a forward of 1 rows at position 10"),
        (MemoryError(), errors.OutOfMemory, "no memory"),
        (RuntimeError("0xdeadbeef"), errors.InternalError, "the daemon's log has the details"),
    ],
)
def test_a_verify_that_fails_at_width_1_too_fails_alone_and_leaves_the_state(error, kind, sentence):
    text = greedy(AttentionTarget(), PROMPT, 20)
    target = FailingTarget()
    engine, _, first = ready(target)
    target.failures = {3: error, 4: error}
    with pytest.raises(kind, match=sentence):
        engine.verify(block([first, *text[1:4]]))
    assert not torch.isnan(target.state(0, len(PROMPT))).any()
    verdict = engine.verify(block([first, *text[1:4]]))
    assert unpack(verdict.tokens) == text[1:5]


def test_a_defect_undoes_the_round_and_is_not_hidden():
    target = FailingTarget()
    engine, _, first = ready(target)
    target.failures = {3: KeyError("a defect")}
    with pytest.raises(KeyError):
        engine.verify(block([first, 1]))
    assert not torch.isnan(target.keys).any()
    assert unpack(engine.verify(block([first])).tokens) == greedy(AttentionTarget(), PROMPT, 2)[1:]


def test_a_failed_chunk_is_undone_and_can_be_sent_again():
    target = FailingTarget()
    engine = engine_over(target)
    engine.open(OpenItem(sequence=1))
    engine.prefill(chunk(0, PROMPT[:4]))
    target.failures = {1: NO_MEMORY}
    with pytest.raises(errors.OutOfMemory):
        engine.prefill(chunk(4, PROMPT[4:8]))
    engine.prefill(chunk(4, PROMPT[4:8]))
    token = engine.prefill(chunk(8, PROMPT[8:], last=True)).token
    assert [token] == greedy(AttentionTarget(), PROMPT, 1)


def test_a_sequence_whose_state_cannot_be_restored_never_computes_again():
    target = FailingTarget()
    engine, _, first = ready(target)
    target.failures = {3: RuntimeError("x"), 4: RuntimeError("x")}
    target.restore_fails = True
    with pytest.raises(errors.InternalError):
        engine.verify(block([first, 1, 2]))
    assert len(target.forwards) == 4  # no second try on a state that is lost
    target.restore_fails, target.failures = False, {}
    with pytest.raises(errors.InternalError, match="lost its state"):
        engine.verify(block([first]))
    engine.close(CloseItem(sequence=1))
    text, *_ = generate(engine, PROMPT, 5, chunk=CHUNK, sequence=2)
    assert text == greedy(AttentionTarget(), PROMPT, 5)


def test_a_target_without_logits_is_an_internal_error(monkeypatch):
    engine, target, first = ready()
    monkeypatch.setattr(target, "verify_batch", lambda *_: None)
    with pytest.raises(errors.InternalError):
        engine.verify(block([first]))


def test_engine_seconds_are_positive_and_within_the_wall_time():
    engine, _, first = ready()
    verdict = engine.verify(block([first]))
    assert 0 < verdict.seconds < 5
