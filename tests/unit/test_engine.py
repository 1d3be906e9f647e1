"""The engine over small real targets: the text, both ways back, and every end."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drive import generate, prefill, unpack
from support.engines import CHUNK, END, PROMPT, WIDTH, block, engine_over, guesser, oracle, ready
from support.plain_host import PlainHost
from support.reference_loop import acceptances, greedy
from support.tiny_target import write_tiny_target
from support.toy_target import AttentionTarget, RecurrentTarget

from protocol import errors
from protocol.config import TargetConfig
from protocol.errors import UsageError
from protocol.messages import OpenItem, Sampling
from target_daemon.checks import Limits
from target_daemon.engine import Engine
from target_daemon.families.base import load_target

KINDS = [AttentionTarget, RecurrentTarget]


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


@pytest.mark.parametrize("family", ["smollm2", "mistral-window", "qwen3"])
def test_both_ways_back_leave_a_checkpoints_state_and_feature_rows_equal(family, tmp_path):
    model = write_tiny_target(tmp_path, family)
    settings = {"taps": (0, 2), "block_size": WIDTH, "prefill_chunk": CHUNK, "dtype": "float32"}
    config = TargetConfig(model=str(model), run_dir="", life=0, ring_window=8, **settings)
    reference = load_target(config, PlainHost())
    text = greedy(reference, PROMPT, 24, chunk=CHUNK)
    found = {}
    for rollback in ("fast", "replay"):
        target = load_target(config, PlainHost())
        engine = Engine(target, Limits(CHUNK, WIDTH, rollback), target.ring)
        drafter = guesser(7, text, PROMPT)
        got, rounds, _ = generate(
            engine, PROMPT, 24, chunk=CHUNK, width=WIDTH, drafter=drafter, close=False
        )
        assert got == text
        committed, shape = END + 23, target.ring.shape
        kept = [row % shape.capacity for row in range(committed - shape.window, committed)]
        features = target.ring.rows[0, kept]
        after = target.verify_batch(0, torch.tensor(text[-1:]), committed, "all")
        found[rollback] = (rounds, features.clone(), after)
    assert found["fast"][0] == found["replay"][0]
    assert 1 < max(found["fast"][0]) < 24
    torch.testing.assert_close(found["fast"][1:], found["replay"][1:], rtol=0, atol=1e-4)


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


def test_eos_is_never_chosen_when_it_is_ignored():
    text = greedy(AttentionTarget(), PROMPT, 30)
    eos = frozenset(text[3:5])
    engine = engine_over(AttentionTarget(eos=tuple(eos)))
    got, _, finish = generate(engine, PROMPT, 30, chunk=CHUNK, sampling=Sampling(ignore_eos=True))
    assert (got[:3], len(got), finish) == (text[:3], 30, "length")
    assert eos.isdisjoint(got)


def test_a_sampling_that_names_ids_of_another_vocabulary_is_refused():
    engine = engine_over(AttentionTarget(vocab_size=40))
    for wrong in (Sampling(logit_bias=((40, 1.0),)), Sampling(stop_token_ids=(3, 40))):
        with pytest.raises(UsageError, match="token id 40; this target's are 0 to 39"):
            engine.open(OpenItem(sequence=1, sampling=wrong))
    engine.open(OpenItem(sequence=1, sampling=Sampling(eos_token_ids=(40,))))


def test_a_finished_sequence_refuses_another_round():
    first = greedy(AttentionTarget(), PROMPT, 1)
    engine, target, token = ready(AttentionTarget(eos=tuple(first)))
    assert [token] == first
    ran = len(target.forwards)
    with pytest.raises(errors.ProtocolError, match="has ended"):
        engine.verify(block([token]))
    assert len(target.forwards) == ran


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_life_finds_every_slot_free_and_its_numbers_new(kind):
    engine, text = engine_over(kind()), greedy(kind(), PROMPT, 20)
    for left_open in (1, 2):
        engine.open(OpenItem(sequence=left_open))
    prefill(engine, 1, PROMPT, chunk=CHUNK)
    engine.close_all()
    with pytest.raises(errors.UnknownSequence):
        engine.verify(block([PROMPT[-1]], base=len(PROMPT), number=1))
    got, _, _ = generate(engine, PROMPT, 20, chunk=CHUNK)
    assert got == text
