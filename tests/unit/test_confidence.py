"""What a draft says of its own proposals: what it is worth, and that it is never taken on trust."""

import math
from dataclasses import replace
from functools import cache
from statistics import mean, stdev

import msgspec
import pytest
from support.model_pair import VOCAB, ModelDraft, ModelTarget, model_text
from support.width_traces import Prices, Trace, made_text, play, recorded

from launch.auto_width import Experience
from launch.confidence import BINS, FAINT, HORIZON, Confidence, Confidences, observed
from launch.events import TargetFacts
from launch.inprocess import run_spec_decode
from launch.policy import AUTO, FULL, Choice, Outcome, Situation
from launch.token_ids import pack_ids, unpack_ids
from launch.worth import Prices as Paid
from launch.worth import Worth, emitted, weighed, worthwhile
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
    """Two hundredths, or by what runs differ among themselves: where widths pay alike they do."""
    without = runs(prices, rate)
    slack = max(0.02 * mean(without), stdev(without))
    assert mean(runs(prices, rate, says)) <= mean(without) + slack


@pytest.mark.parametrize("says", USEFUL)
def test_decoding_is_faster_where_rows_cost_and_it_says_something(says):
    assert mean(runs("steep", 0.75, says)) < 0.97 * mean(runs("steep", 0.75))


def seconds_of(one, says=None):
    return mean(play(one, noise=0.1, seed=seed, says=says).seconds for seed in range(6))


@pytest.mark.parametrize("recorded", recorded(), ids=lambda trace: trace.name)
def test_recorded_texts_are_no_slower_for_what_the_draft_states(recorded):
    silent = seconds_of(replace(recorded, stated=()))
    assert seconds_of(recorded) < 1.01 * silent


def test_a_width_that_was_asked_for_is_kept_whatever_is_said():
    for rows in (FULL, 5):
        policy = Experience().policy(rows)
        choice = policy.choose(Situation(8, 100, 0))
        assert policy.cut(choice, (0.0,) * 7) == choice.verify


def test_nothing_is_cut_before_prices_are_known():
    policy = Experience().policy(AUTO)
    choice = policy.choose(Situation(8, 100, 0))
    assert policy.cut(choice, (0.0,) * 7) == 8


def test_as_many_rows_are_verified_as_the_draft_is_sure_of():
    experience = Experience()
    one = trace(RISING, 0.9)
    play(one, experience=experience, says=lambda right, slot, source: 0.95 if slot < right else 0.1)
    policy = experience.policy(AUTO)
    policy.choose(Situation(8, 100, 0))
    assert policy.cut(Choice(8, 8), (0.95,) * 7) == 8
    assert policy.cut(Choice(8, 8), (0.95, 0.95, *(0.1,) * 5)) == 3
    assert policy.cut(Choice(8, 8), (0.1,) * 7) == 1  # not even one
    assert policy.cut(Choice(1, 1), ()) == 1
    assert policy.cut(Choice(8, 8), ()) == policy.cut(Choice(8, 8), (0.1,) * 3)  # nothing stated


def test_a_whole_probe_is_not_cut():
    experience = Experience()
    one = Trace("useless", 8, STEEP, (made_text([0.05] * 300, 8, 1),))
    play(one, experience=experience, says=SAYS["much"])
    policy = experience.policy(AUTO)
    for at in range(600):
        choice = policy.choose(Situation(8, 100, at))
        rows = policy.cut(choice, (0.01,) * (choice.propose - 1))
        if rows > 1:  # what it costs is the question
            assert rows == choice.propose
            return
        offered = (-1,) * (choice.propose - 1)
        stated = (0.01,) * len(offered)
        policy.note(Outcome(at, 1, offered, 0, (1,), 0.005, 0.0, 1, STEP, stated))
    pytest.fail("no whole probe in 600 rounds")


class Priced(ModelTarget):
    """Every row of a verify but the first costs a fifth of it."""

    def verify(self, item):
        rows = len(unpack_ids(item.tokens))
        return msgspec.structs.replace(super().verify(item), seconds=0.2 + 0.05 * rows)


class Sure(ModelDraft):
    """Knows where it is wrong."""

    def propose(self, item):
        found, history = super().propose(item), [*self.target.tokens[item.sequence], item.pending]
        stated = []
        for token in unpack_ids(found.tokens):
            stated.append(0.95 if self.target.model(history, self.target.eos) == token else 0.05)
            history.append(token)
        return msgspec.structs.replace(found, confidences=tuple(stated))


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


def test_a_draft_is_believed_at_first_and_then_as_far_as_it_came_true():
    confidence = Confidence()
    assert confidence.chances([0.0, 0.31, 1.0]) == [FAINT, 0.31, 1.0]
    for _ in range(3 * int(HORIZON)):
        right = Outcome(0, 2, (5,), 1, (5, 6), 0, 0, 0, 1, confidences=(0.15,))
        wrong = Outcome(0, 2, (5,), 1, (9,), 0, 0, 0, 1, confidences=(0.95,))
        confidence.note(right)
        confidence.note(wrong)
    low, middle, high = confidence.chances([0.15, 0.5, 0.95])
    assert low > 0.85
    assert middle == 0.5
    assert high < 0.1


def test_a_draft_that_states_next_to_nothing_of_all_that_it_has_right_is_used():
    """As at a high temperature: every id has a small share, and the noise is the target's too."""
    one = trace(FLAT, 0.9)
    alone = play(one, 1).seconds
    for stated in (0.0, 1e-30, 1e-3):
        seconds = play(one, says=lambda right, slot, source, stated=stated: stated).seconds
        assert seconds < 0.5 * alone


def test_what_a_draft_states_at_last_is_taken_in_however_little_it_stated():
    confidence, again = Confidence(), Confidence()
    for _ in range(3000):
        confidence.note(Outcome(0, 2, (5,), 1, (9,), 0, 0, 0, 1, confidences=(0.0,)))
    again.restore(*confidence.counts)
    assert again.counts == confidence.counts


def test_what_was_known_of_a_draft_is_taken_in_where_it_can_be_true():
    confidence, again = Confidence(), Confidence()
    confidence.note(Outcome(0, 2, (5,), 1, (5, 6), 0, 0, 0, 1, confidences=(0.15,)))
    again.restore(*confidence.counts)
    assert again.counts == confidence.counts
    for right, stated in (([1.0], [1.0]), ([1.0] * BINS, [0.0] * BINS), ([1.0] * BINS, [1.0])):
        again.restore(right, stated)
    assert again.counts == confidence.counts


def test_temperatures_that_are_near_share_what_is_known():
    known = Confidences()
    assert known.at(0.0) is known.at(0.04)
    assert known.at(0.0) is not known.at(0.7)
    known.at(0.7).note(Outcome(0, 2, (5,), 1, (5, 6), 0, 0, 0, 1, confidences=(0.15,)))
    again = Confidences()
    again.restore(known.counts)
    assert again.counts == known.counts


def test_a_row_is_verified_where_it_emits_more_than_its_time_does_elsewhere():
    seconds = [1.0, 1.5, 2.0, 2.5]
    assert emitted([0.5, 0.5]) == [1.0, 1.5, 1.75]
    assert worthwhile(emitted([0.9, 0.9, 0.9]), seconds, 1.0) == [1, 2, 3, 4]
    assert worthwhile(emitted([0.9, 0.3, 0.9]), seconds, 1.0) == [1, 2, 2, 2]
    assert worthwhile(emitted([0.1, 0.1, 0.1]), seconds, 1.0) == [1, 1, 1, 1]
    assert worthwhile(emitted([0.1, 0.1, 0.1]), seconds, 0.0) == [1, 2, 3, 4]
    assert worthwhile(emitted([0.9, 0.45, 0.9]), [1.0, 1.0, 1.405, 1.405], 1.0) == [1, 2, 2, 4]


def test_what_rounds_are_worth_follows_the_last_ones():
    paid = Paid(verify=[1.0, 1.25, 1.5], ask=[0.0, 0.25, 0.5])
    good = weighed(emitted([0.9, 0.9]), paid, [1, 2, 3])
    bad = weighed(emitted([0.0, 0.0]), paid, [1, 1, 1])
    assert good.rates() == [1.0, 1.9 / 1.5, 2.71 / 2.0]
    assert bad.rates() == [1.0, 1 / 1.25, 1 / 1.5]
    worth = Worth()
    for block in [good] * 20 + [bad] * 3:
        worth.add(block)
    copy = worth.copy()
    assert max(worth.rates()[1:]) < 1.1
    worth.add(bad)
    assert copy.rates() != worth.rates()
    worth.add(weighed(emitted([0.9]), Paid([1.0, 1.25], [0.0, 0.25]), [1, 2]))
    assert len(worth.rates()) == 3
