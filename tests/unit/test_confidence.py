"""What a draft says of its own proposals: what it is worth, and that it is never taken on trust."""

import math
from functools import cache
from statistics import mean, stdev

import pytest
from msgspec.structs import replace
from support.model_pair import VOCAB, ModelDraft, ModelTarget, model_text
from support.width_traces import Prices, Trace, made_text, play, recorded

from launch.auto_width import Experience
from launch.confidence import Confidence, observed, worthwhile
from launch.events import TargetFacts
from launch.inprocess import run_spec_decode
from launch.policy import AUTO, FULL, Choice, Outcome, Situation
from launch.token_ids import pack_ids, unpack_ids
from protocol.codec import decode, encode
from protocol.errors import ProtocolError
from protocol.messages import Proposed, ProposedItem

STEP = 0.025
ROWS = range(8)
FLAT = Prices(tuple(STEP * (1 + 0.017 * i) for i in ROWS), (STEP * 0.25,) * 8, 5e-5, 5e-4)
RISING = Prices(tuple(STEP * (1 + 0.12 * i) for i in ROWS), (STEP * 0.3,) * 8, 1e-4, 9e-4)
STEEP = Prices(tuple(STEP * (1 + 0.3 * i) for i in ROWS), (STEP * 0.2,) * 8, 1e-4, 9e-4)
PRICES = {"flat": FLAT, "rising": RISING, "steep": STEEP}


def said(right, slot, source, sharp):
    """0.9 where the slot is right and 0.1 where not, told apart in a share `sharp` of cases."""
    truth = slot < right
    return 0.9 if (truth if source.random() < sharp else source.random() < 0.5) else 0.1


SAYS = {
    "all that there is to know": lambda *given: said(*given, 1.0),
    "much": lambda *given: said(*given, 0.7),
    "nothing": lambda *given: said(*given, 0.0),
    "always the same": lambda right, slot, source: 0.97,
    "the contrary": lambda *given: 1 - said(*given, 0.7),
    "numbers of another kind": lambda right, slot, source: 0.31 if slot < right else 0.27,
}
USEFUL = ("all that there is to know", "much", "the contrary")


def trace(prices, rate=0.75, tokens=600):
    texts = tuple(made_text([rate] * tokens, 8, seed) for seed in range(2))
    return Trace("made", 8, prices, texts)


@cache
def runs(prices, rate, says=None):
    """Seconds of several runs with times that vary."""
    one, what = trace(PRICES[prices], rate), SAYS.get(says)
    return [play(one, noise=0.05, seed=seed, says=what).seconds for seed in range(3)]


PLACES = [("flat", 0.75), ("rising", 0.5), ("rising", 0.9), ("steep", 0.5), ("steep", 0.75)]


@pytest.mark.parametrize(("prices", "rate"), PLACES)
@pytest.mark.parametrize("says", SAYS)
def test_decoding_is_never_slower_for_what_a_draft_says_of_itself(prices, rate, says):
    """A hundredth, or by what runs differ among themselves: where widths pay alike they do."""
    without = runs(prices, rate)
    slack = max(0.01 * mean(without), stdev(without))
    assert mean(runs(prices, rate, says)) <= mean(without) + slack


@pytest.mark.parametrize("says", USEFUL)
def test_decoding_is_faster_where_rows_cost_and_it_says_something(says):
    assert mean(runs("steep", 0.75, says)) < 0.97 * mean(runs("steep", 0.75))


@pytest.mark.parametrize("recorded", recorded(), ids=lambda trace: trace.name)
@pytest.mark.parametrize("says", ["much", "nothing"])
def test_recorded_texts_are_no_slower_either(recorded, says):
    with_it = mean(play(recorded, noise=0.1, seed=s, says=SAYS[says]).seconds for s in range(3))
    without = mean(play(recorded, noise=0.1, seed=s).seconds for s in range(3))
    assert with_it <= 1.015 * without


def test_a_width_that_was_asked_for_is_kept_whatever_is_said():
    for rows in (FULL, 5):
        policy = Experience().policy(rows)
        choice = policy.choose(Situation(8, 100, 0))
        assert policy.cut(choice, (0.0,) * 7) == choice.verify


def test_nothing_is_cut_before_prices_are_known_or_where_nothing_is_stated():
    experience = Experience()
    policy = experience.policy(AUTO)
    choice = policy.choose(Situation(8, 100, 0))
    assert policy.cut(choice, (0.0,) * 7) == 8
    play(trace(RISING, 0.9), experience=experience, says=SAYS["much"])
    policy = experience.policy(AUTO)
    policy.choose(Situation(8, 100, 0))
    assert policy.cut(Choice(8, 8), ()) == policy.cut(Choice(8, 8), (0.1,) * 3) == 8
    assert policy.cut(Choice(8, 8), (0.9,) * 7) == 8
    unsure = policy.cut(Choice(8, 8), (0.1,) * 7)
    assert 2 <= unsure < 8
    assert unsure <= policy.cut(Choice(8, 8), (0.9, 0.9, *(0.1,) * 5)) < 8
    assert policy.cut(Choice(1, 1), ()) == 1


def test_a_probe_is_not_cut():
    experience = Experience()
    one = Trace("useless", 8, STEEP, (made_text([0.05] * 300, 8, 1),))
    play(one, experience=experience, says=SAYS["much"])
    policy = experience.policy(AUTO)
    for at in range(600):
        choice = policy.choose(Situation(8, 100, at))
        if choice.propose == choice.verify == 8:  # a whole probe: what it brings is the question
            assert policy.cut(choice, (0.01,) * 7) == 8
            return
        offered = (-1,) * (choice.propose - 1)
        drafted = choice.verify - 1
        policy.note(Outcome(at, choice.verify, offered, drafted, (1,), 0.005, 0.0, 1, STEP))
    pytest.fail("no probe in 600 rounds")


class Priced(ModelTarget):
    """Every row of a verify but the first costs a fifth of it."""

    def verify(self, item):
        rows = len(unpack_ids(item.tokens))
        return replace(super().verify(item), seconds=0.2 + 0.05 * rows)


class Sure(ModelDraft):
    """Knows where it is wrong."""

    def propose(self, item):
        found, history = super().propose(item), [*self.target.tokens[item.sequence], item.pending]
        stated = []
        for token in unpack_ids(found.tokens):
            stated.append(0.95 if self.target.model(history, self.target.eos) == token else 0.05)
            history.append(token)
        return replace(found, confidences=tuple(stated))


def test_a_block_is_cut_in_the_rounds_and_the_text_is_the_same():
    prompt, target = list(range(1, 30)), Priced(eos=-1)
    facts = TargetFacts(1, VOCAB, 1000, 16, ModelTarget.capacity, 16)
    cut = {}
    for kind in (ModelDraft, Sure):
        pieces, target = [], Priced(eos=-1)
        result = run_spec_decode(
            target,
            kind(target, luck=4),
            prompt,
            400,
            facts=facts,
            block_size=6,
            draft_context=32,
            block_width=AUTO,
            on_piece=pieces.append,
        )
        assert list(result.token_ids) == model_text(prompt, 400, -1)[0]
        seconds = sum(piece.verify_seconds + piece.draft_seconds for piece in pieces)
        cut[kind] = seconds, [piece.width for piece in pieces if piece.proposed]
    assert cut[Sure][0] < cut[ModelDraft][0]
    assert len(set(cut[Sure][1])) > 2


@pytest.mark.parametrize("stated", [-0.1, 1.1, math.nan, math.inf])
def test_a_confidence_that_is_no_share_is_refused_on_the_wire(stated):
    item = ProposedItem(
        sequence=1,
        round=1,
        tokens=pack_ids([5]),
        confidences=(stated,),
        context_rows=1,
        draft_seconds=0.0,
        ingest_seconds=0.0,
    )
    message = Proposed(target_life=1, draft_life=1, results=(item,))
    with pytest.raises(ProtocolError, match="confidences"):
        decode(encode(message), (Proposed,))


@pytest.mark.parametrize(
    ("offered", "drafted", "tokens", "known"),
    [
        ((5, 6, 7), 3, (5, 6, 7, 8), [True, True, True]),
        ((5, 6, 7), 3, (5, 9), [True, False]),
        ((5, 6, 7), 1, (5, 6), [True, True]),
        ((5, 6, 7), 1, (5, 9), [True, False]),
        ((5, 6, 7), 0, (5,), [True]),
        ((), 0, (5,), []),
    ],
)
def test_the_token_behind_a_cut_says_whether_the_next_slot_was_right(
    offered, drafted, tokens, known
):
    rows = drafted + 1
    assert observed(Outcome(0, rows, offered, drafted, tokens, 0, 0, 0, 1)) == known


def test_what_is_stated_is_weighed_by_what_came_of_it():
    confidence = Confidence()
    usual = [0.5, 0.5, 0.5]
    assert confidence.rates(usual, [0.0, 0.5, 1.0]) == usual
    for _ in range(40):
        right = Outcome(0, 2, (5,), 1, (5, 6), 0, 0, 0, 1, confidences=(1.0,))
        wrong = Outcome(0, 2, (5,), 1, (9,), 0, 0, 0, 1, confidences=(0.0,))
        confidence.note([0.5], right)
        confidence.note([0.5], wrong)
    low, middle, high = confidence.rates(usual, [0.0, 0.5, 1.0])
    assert low < 0.2
    assert middle == 0.5
    assert 0.8 < high <= 1.0
    for _ in range(600):  # of which nothing is heard any more is forgotten
        confidence.note([], Outcome(0, 1, (), 0, (1,), 0, 0, 0, 1, confidences=()))
    assert confidence.rates(usual, [0.0, 1.0]) == pytest.approx([0.5, 0.5], abs=0.01)


def test_a_row_is_verified_where_it_emits_more_than_its_time_does_elsewhere():
    seconds_by_rows = [1.0, 1.5, 2.0, 2.5]
    assert worthwhile([0.9, 0.9, 0.9], seconds_by_rows, 1.0) == 4
    assert worthwhile([0.9, 0.3, 0.9], seconds_by_rows, 1.0) == 2
    assert worthwhile([0.1, 0.1, 0.1], seconds_by_rows, 1.0) == 2  # at least one of the draft's
    assert worthwhile([0.1, 0.1, 0.1], seconds_by_rows, 0.0) == 4
    assert worthwhile([0.9, 0.45, 0.9], [1.0, 1.0, 1.41, 1.41], 1.0) == 4  # not for so little
