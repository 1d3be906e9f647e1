"""Replay: a new engine brought to where a lost one was, by what a client has."""

import pytest
import torch
from support.drive import generate, pack, prefill, unpack
from support.engines import CHUNK, END, PROMPT, WIDTH, block, engine_over
from support.reference_loop import greedy
from support.toy_target import AttentionTarget, RecurrentTarget

from protocol.errors import PositionMismatch, PromptTooLong, ProtocolError
from protocol.messages import OpenItem, ReplayItem

KINDS = [AttentionTarget, RecurrentTarget]


def replay(tokens, base=END):
    return ReplayItem(sequence=1, round=9, base_pos=base, tokens=pack(tokens))


def prefilled(target, **options):
    engine = engine_over(target, **options)
    engine.open(OpenItem(sequence=1))
    prefill(engine, 1, PROMPT, CHUNK)
    return engine


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rollback", ["fast", "replay"])
@pytest.mark.parametrize("emitted", [1, 2, WIDTH, WIDTH + 1, WIDTH + 2, 30])
def test_the_state_and_the_text_are_those_of_the_lost_life(kind, rollback, emitted):
    text = greedy(kind(), PROMPT, 40)
    lost = kind()
    generate(engine_over(lost), PROMPT, emitted, chunk=CHUNK, close=False)
    target = kind()
    engine = prefilled(target, rollback=rollback)
    answer = engine.replay(replay(text[:emitted]))
    assert (answer.committed, answer.mismatches) == (END + emitted - 1, 0)
    states = (each.state(0, answer.committed) for each in (target, lost))
    torch.testing.assert_close(*states, rtol=0, atol=0)
    verdict = engine.verify(
        block(text[emitted - 1 : emitted], base=answer.committed, number=10, budget=5)
    )
    assert unpack(verdict.tokens) == text[emitted : emitted + 1]


def test_replay_may_come_in_parts():
    text = greedy(AttentionTarget(), PROMPT, 40)
    engine = prefilled(AttentionTarget())
    engine.replay(replay(text[:10]))
    assert engine.replay(replay(text[9:20], END + 9)).committed == END + 19
    verdict = engine.verify(block(text[19:23], base=END + 19, number=10, budget=9))
    assert unpack(verdict.tokens) == text[20:24]


def test_the_journal_wins_and_what_would_be_chosen_otherwise_is_counted():
    text = greedy(AttentionTarget(), PROMPT, 20)
    other = [(token + 1) % 40 for token in text[:3]]
    engine = prefilled(AttentionTarget())
    answer = engine.replay(replay(other))
    assert 1 <= answer.mismatches <= 3
    engine.verify(block(other[-1:], base=answer.committed, number=10))


def test_what_does_not_follow_is_refused_and_changes_nothing():
    text = greedy(AttentionTarget(), PROMPT, 20)
    engine = engine_over(AttentionTarget())
    engine.open(OpenItem(sequence=1))
    with pytest.raises(ProtocolError, match="not prefilled"):
        engine.replay(replay(text[:3], 0))
    prefill(engine, 1, PROMPT, CHUNK)
    with pytest.raises(PositionMismatch, match="replay is based at 3"):
        engine.replay(replay(text[:3], 3))
    with pytest.raises(ProtocolError, match="outside the vocabulary"):
        engine.replay(replay([5, 10**6]))
    with pytest.raises(PromptTooLong):
        engine.replay(replay([1] * 10_000))
    with pytest.raises(PromptTooLong):
        engine.replay(replay([]))
    assert engine.replay(replay(text[:3])).committed == END + 2
