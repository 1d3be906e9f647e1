"""How wide a block is: fixed widths, and the one that learns, played on made traces."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from statistics import mean

import pytest
from support.width_traces import Prices, made, play, recorded, seconds_from

from launch.auto_width import Experience
from launch.policy import AUTO, FULL, FixedWidth, Outcome, Situation
from launch.probes import FIRST, Probes
from protocol.messages import (
    ItemFailed,
    Prefilled,
    Proposed,
    ProposedItem,
    Verdict,
    Verified,
)

STEP = 0.025
RISING = (1, 1.25, 1.35, 1.4, 1.6, 1.75, 1.85, 1.9)  # a verify where rows cost: fp32 here
DRAFT = (0.3, 0.35, 0.4, 0.45, 0.5, 0.53, 0.57, 0.6)
DEAR = Prices(tuple(STEP * x for x in RISING), tuple(STEP * x for x in DRAFT), 1e-4, 9e-4)
FLAT = Prices(tuple(STEP * (1 + 0.017 * i) for i in range(8)), (STEP * 0.25,) * 8, 5e-5, 5e-4)
STEEP = Prices(tuple(STEP * (1 + i) for i in range(8)), (STEP * 2,) * 8, 1e-4)
RECORDED = {trace.name: trace for trace in recorded()}
FP32 = RECORDED["turns, fp32"]
# Of the recorded turns: texts for which the draft is useless, and others for which it is not.
USELESS = {"translation-225": 0, "translation-169": 2, "summarization-276": 4}
GOOD = {"math_reasoning-401": 1, "count": 6}
HOPELESS = (0, 7, 8)  # three translations, of 1.08, 1.07 and 1.12 tokens a round


def trace(prices, *phases, texts=2):
    rates = list(chain.from_iterable([rate] * tokens for rate, tokens in phases))
    return made("made", 8, prices, *[rates] * texts)


def silent(one):
    """The same text, of whose slots the draft states nothing."""
    return replace(one, stated=())


def share_of_the_best(one, seeds=8):
    """The best fixed width's seconds over the policy's, mean of several runs with noisy times."""
    best = min(play(one, width).seconds for width in range(1, one.block_size + 1))
    return best / mean(play(one, noise=0.1, seed=seed).seconds for seed in range(seeds))


@pytest.mark.parametrize(
    ("rows", "block_size", "budget", "width"),
    [(FULL, 16, 100, 16), (FULL, 16, 3, 3), (FULL, 1, 9, 1), (5, 16, 9, 5), (1, 8, 9, 1)],
)
def test_a_fixed_width_is_kept_within_the_block_and_what_is_still_wanted(
    rows, block_size, budget, width
):
    policy = Experience().policy(rows)
    choice = policy.choose(Situation(block_size, budget, 0))
    assert (choice.propose, choice.verify) == (width, width)


def test_only_a_fixed_width_of_one_is_a_reason_for_no_draft():
    assert FixedWidth(1).reason() == "a block width of 1 was asked for"
    assert FixedWidth(2).reason() == FixedWidth(FULL).reason() == ""


@pytest.mark.parametrize("prices", [DEAR, FLAT, FP32.prices])
def test_a_useless_draft_costs_a_twentieth_at_the_most(prices):
    useless = trace(prices, (0.0, 512))
    alone = play(useless, 1).seconds
    for seed in range(5):
        assert play(useless, noise=0.1, seed=seed).seconds <= alone / 0.95


def test_a_useless_draft_that_states_nothing_or_the_contrary_costs_no_more():
    useless = trace(DEAR, (0.0, 512))
    alone = play(useless, 1).seconds
    assert play(silent(useless)).seconds <= alone / 0.95
    assert play(useless, says=lambda right, slot, source: 0.97).seconds <= alone / 0.95


@pytest.mark.parametrize("name", ["turns, fp32", "turns, flat"])
def test_recorded_texts_that_the_draft_cannot_guess_cost_a_twentieth_at_the_most(name):
    useless = RECORDED[name].only(*HOPELESS)
    alone = play(useless, 1).seconds
    runs = [play(useless, noise=0.1, seed=seed).seconds for seed in range(8)]
    assert mean(runs) <= alone / 0.95


@pytest.mark.parametrize("prices", [DEAR, FLAT])
@pytest.mark.parametrize("rate", [0.8, 0.9, 0.97])
def test_a_draft_that_pays_is_used_as_well_as_by_the_best_fixed_width(prices, rate):
    good = trace(prices, (rate, 512))
    assert share_of_the_best(good) >= 0.98


@pytest.mark.parametrize("recorded", recorded(), ids=lambda trace: trace.name)
def test_recorded_texts_are_decoded_as_fast_as_by_the_best_fixed_width(recorded):
    assert share_of_the_best(recorded) >= 0.98


@pytest.mark.parametrize("recorded", recorded(), ids=lambda trace: trace.name)
def test_recorded_texts_are_decoded_as_fast_as_without_the_draft(recorded):
    alone = play(recorded, 1).seconds
    for seed in range(4):
        assert play(recorded, noise=0.1, seed=seed).seconds <= alone / 0.95


def poisoned(prices, factor):
    """As another process remembered it, in whose sweep wide forwards were slow."""
    experience = Experience()
    curve = experience.costs.verify
    cells = [(0, rows, prices.verify[rows - 1], 2) for rows in (1, 2, 3)]
    curve.restore(
        [*cells, (0, 4, factor * prices.verify[3], 2), (0, 8, factor * prices.verify[7], 2)]
    )
    experience.costs.draft.restore([(0, 8, factor * prices.draft[7], 2)])
    return experience


@pytest.mark.parametrize("prices", [DEAR, FLAT])
@pytest.mark.parametrize("factor", [0.5, 3, 15])
def test_wide_times_of_another_day_do_not_keep_a_good_draft_off(prices, factor):
    good = trace(prices, (0.9, 400), texts=1)
    seconds = play(good, experience=poisoned(prices, factor)).seconds
    assert seconds <= 1.05 * play(good).seconds


@pytest.mark.parametrize("prices", [DEAR, FLAT])
def test_a_draft_that_turns_useless_is_left_within_twenty_rounds(prices):
    turns = trace(prices, (0.95, 200), (0.0, 300), texts=1)
    behind = [width for at, width, _ in play(turns).rounds if at >= 200]
    assert max(behind[:36]) == 1  # the first block states it
    behind = [width for at, width, _ in play(silent(turns)).rounds if at >= 200]
    assert behind[:20].count(8) > 0
    assert sum(width > 1 for width in behind[20:36]) <= 2  # of blocks that were asked for to probe


@pytest.mark.parametrize("prices", [DEAR, FLAT, FP32.prices])
@pytest.mark.parametrize("spell", [40, 47, 300, 311])
def test_a_draft_that_turns_good_is_taken_up_within_twenty_rounds(prices, spell):
    turns = trace(prices, (0.95, 200), (0.0, spell), (1.0, 600), texts=1)
    for one in (turns, silent(turns)):
        behind = [width for at, width, _ in play(one).rounds if at >= 200 + spell]
        assert behind[20:40].count(8) >= 19  # and one round for the price of a step


@dataclass(frozen=True)
class Turn:
    """One text behind another, and what the policy did from the second's start on."""

    widths: tuple[int, ...]  # of the rounds, from there on
    asked: tuple[int, ...]  # the rounds in which the draft was asked
    followed: float  # seconds in parts of what following it late would take


@cache
def turned(name, before, behind):
    """A turn of recorded texts, at each of 16 places: wherever it can lie between two probes.

    Late is: 20 more rounds of what was best before it, then what is best behind it.
    """
    found = []
    for cut in range(16):
        whole = RECORDED[name].behind(cut, before, behind)
        at, end = len(RECORDED[name].right[before]) - cut, len(whole.right[0])
        old, new = (
            min(range(1, 9), key=lambda width, of=of: seconds_from(whole, width, *of)[0])
            for of in ((0, at), (at, end))
        )
        late, reached = seconds_from(whole, old, at, end, rounds=20)
        late += seconds_from(whole, new, reached, end)[0]
        played = play(whole, noise=0.1, seed=cut)
        rounds = [one for one in played.rounds if one[0] >= at]
        asked = tuple(number for number, one in enumerate(rounds) if one[0] in played.asked)
        widths = tuple(width for _, width, _ in rounds)
        found.append(Turn(widths, asked, late / sum(seconds for _, _, seconds in rounds)))
    return found


@pytest.mark.parametrize("name", ["turns, fp32", "turns, flat"])
@pytest.mark.parametrize("useless", USELESS)
@pytest.mark.parametrize("good", GOOD)
def test_a_turn_of_recorded_texts_is_followed_within_twenty_rounds_at_every_place(
    name, useless, good
):
    before, behind = USELESS[useless], GOOD[good]
    for turn in turned(name, before, behind):
        assert any(width > 1 for width in turn.widths[:20])


@pytest.mark.parametrize("name", ["turns, fp32", "turns, flat"])
@pytest.mark.parametrize("useless", USELESS)
@pytest.mark.parametrize("good", GOOD)
def test_following_a_turn_of_recorded_texts_costs_no_more_than_twenty_late_rounds(
    name, useless, good
):
    """In the mean of the places; what comes later in a text differs from place to place."""
    before, behind = USELESS[useless], GOOD[good]
    for turns in (turned(name, before, behind), turned(name, behind, before)):
        assert mean(turn.followed for turn in turns) >= 0.97
        assert min(turn.followed for turn in turns) >= 0.9


@pytest.mark.parametrize("good", GOOD)
def test_a_recorded_text_that_turns_useless_is_left_within_twenty_rounds_at_every_place(good):
    for turn in turned("turns, fp32", GOOD[good], USELESS["translation-225"]):
        assert sum(20 <= number < 36 for number in turn.asked) <= 4  # probes


def test_the_price_from_which_no_policy_can_keep_both_bars():
    """A probe of `price` rounds at least every 20 costs a useless draft ``price / 20`` of the time.

    Only 1 / 0.95 - 1 may be lost. Ours come every 10 rounds up to 0.38 rounds of price, and keep to
    the share of the time beyond it.
    """
    conflict = 20 * (1 / 0.95 - 1)
    assert 1.05 < conflict < 1.06
    for price in (0.1, 0.4, 0.64, 0.8, conflict, 2.0, 5.0):
        probes = Probes()
        for _ in range(9):
            probes.begin()
            probes.fail(price)
        assert price / probes.interval < 1 / 0.95 - 1
        assert (probes.interval == FIRST) == (price < 0.38)


def test_prices_that_change_are_followed_within_twenty_rounds():
    turns = trace(FLAT, (0.6, 800), texts=1)
    played = play(turns, prices=lambda at: STEEP if at >= 400 else FLAT)
    behind = [width for at, width, _ in played.rounds if at >= 400]
    assert behind[0] > 1
    assert sum(width > 1 for width in behind[20:36]) <= 1  # for the price of a block


@pytest.mark.parametrize("at", [40, 300, 1100])
@pytest.mark.parametrize("dearer", ["rows", "block"])
def test_prices_that_rise_are_followed_wherever_a_step_was_timed_last(at, dearer):
    """A wide block was timed long before, and a step in another class of context."""
    before = Prices(tuple(STEP * (1 + i / 9) for i in range(8)), (STEP * 0.3,) * 8, 1e-4, 9e-4)
    rows = before.verify[:1] + tuple(3 * one for one in before.verify[1:])
    block = tuple(10 * one for one in before.draft)
    after = replace(before, **{"rows": {"verify": rows}, "block": {"draft": block}}[dearer])
    one = trace(before, (0.7, at + 400), texts=1)
    played = play(one, prices=lambda position: after if position >= at else before)
    asked = [round_[0] for round_ in played.rounds if round_[0] in played.asked]
    behind = [round_[0] for round_ in played.rounds if round_[0] >= at]
    late = set(behind[60:160])
    assert len(late.intersection(asked)) <= 10  # probes


def test_nothing_is_compared_with_a_step_whose_price_is_not_known():
    policy = Experience().policy(AUTO)
    chosen = []
    for number in range(3):
        choice = policy.choose(Situation(8, 100, number))
        chosen.append(choice.verify)
        offered = tuple(range(choice.propose - 1))
        policy.note(Outcome(number, choice.verify, offered, len(offered), (1,), 1, 0, 1, 1))
    assert chosen[:2] == [8, 1]


def test_a_round_in_which_no_draft_could_be_asked_is_no_reason_and_no_choice():
    policy = Experience().policy(AUTO)
    assert policy.choose(Situation(1, 100, 0)).verify == 1
    policy.note(Outcome(0, 1, (), 0, (1,), 0.0, 0.0, 0, 1.0))
    assert policy.reason() == ""


def test_the_reason_says_what_a_round_brings_and_what_it_costs():
    experience = Experience()
    useless = trace(DEAR, (0.0, 200), texts=1)
    play(useless, experience=experience)
    policy = experience.policy(AUTO)
    for at in range(40):
        choice = policy.choose(Situation(8, 100, at))
        offered = (-1,) * (choice.propose - 1)
        drafted = choice.verify - 1
        policy.note(Outcome(at, choice.verify, offered, drafted, (1,), 0.6 * STEP, 0.0, 1, STEP))
    assert policy.reason().startswith("drafting does not pay here: 1.")
    assert " tokens a round of late, of 1." in policy.reason()


def test_a_draft_that_pays_and_was_not_used_for_another_reason_is_not_said_not_to_pay():
    experience = Experience()
    play(trace(FLAT, (0.95, 200), texts=1), experience=experience)
    policy = experience.policy(AUTO)
    for at in range(40):  # what was expected of the text took the draft's place
        policy.choose(Situation(8, 100, at))
        policy.note(Outcome(at, 8, (), 0, (1,) * 8, 0.0, 0.0, 0, STEP))
    assert policy.reason() == ""


def test_the_next_request_begins_with_what_the_last_one_learned():
    experience = Experience()
    useless = trace(DEAR, (0.0, 300), texts=1)
    play(useless, experience=experience)
    assert experience.policy(AUTO).choose(Situation(8, 100, 0)).verify == 1


def test_requests_of_a_token_or_two_forget_nothing_that_was_learned():
    experience = Experience()
    play(trace(DEAR, (0.0, 100), texts=1), experience=experience)
    known = experience.worth.rates()
    for _ in range(2000):  # what is known was let fade by every one of them
        policy = experience.policy(AUTO)
        choice = policy.choose(Situation(8, 1, 50))
        policy.note(Outcome(50, choice.verify, (), 0, (1,), 0.0, 0.0, 0, STEP))
        assert policy.reason() == ""
    assert experience.worth.rates() == known
    assert experience.policy(AUTO).choose(Situation(8, 100, 50)).verify > 1  # a probe is due


def test_a_draft_that_pays_is_used_though_guesses_leave_no_round_to_time_a_step():
    policy = Experience().policy(AUTO)
    used = []
    for at in range(200):
        choice = policy.choose(Situation(8, 1000, 5000 + at))
        stated = (0.9,) * (choice.propose - 1)
        rows = policy.cut(choice, stated)
        offered = (7,) * (choice.propose - 1)
        drafted = rows - 1
        guessed = rows + (at > 2)  # n-grams add a row to every round, and are wrong
        seconds = FLAT.draft[0] if offered else 0.0, 0.0, 0, FLAT.verify[min(guessed, 8) - 1]
        policy.note(Outcome(5000 + at, guessed, offered, drafted, (7,) * rows, *seconds, stated))
        used.append(rows > 1)
    assert used.count(True) >= 190


@pytest.mark.parametrize("step", [0.0, 5e-324, 1e-12, 1e9])
@pytest.mark.parametrize("block", [0.0, 5e-324, 1e9])
def test_times_that_no_clock_would_tell_are_prices_like_any_other(step, block):
    experience = Experience()
    for _ in range(4):
        policy = experience.policy(AUTO)
        for at in range(60):
            choice = policy.choose(Situation(8, 100, at))
            stated = (0.5,) * (choice.propose - 1)
            rows = policy.cut(choice, stated)
            offered = (-1,) * (choice.propose - 1)
            seconds = (block, 0.0, 1, step) if at % 9 else (step, block, 1, block)
            policy.note(Outcome(at, rows, offered, rows - 1, (1,), *seconds, stated))
        assert isinstance(policy.reason(), str)
    assert all(experience.costs.alone(8, 0))


def test_the_draft_is_asked_for_four_rows_at_least_where_so_many_are_wanted():
    experience = Experience()
    play(trace(DEAR, (0.6, 300), texts=1), experience=experience)
    policy = experience.policy(AUTO)
    asked = set()
    for at in range(60):
        choice = policy.choose(Situation(8, 3 if at % 2 else 100, at))
        stated = (0.5,) * (choice.propose - 1)
        rows = policy.cut(choice, stated)
        offered = (-1,) * len(stated)
        asked.add((at % 2, choice.propose))
        policy.note(Outcome(at, rows, offered, rows - 1, (1,), 0.4 * STEP, 0.0, 1, STEP, stated))
    assert asked <= {(0, 1), (1, 1), (1, 3)} | {(0, rows) for rows in range(4, 9)}
    assert len(asked) > 2


def test_hand_over_is_what_an_answer_took_beside_its_engine():
    experience = Experience()
    costs = experience.costs
    verdict = Verdict(
        sequence=1, accepted=0, tokens=b"", chosen=b"", committed=1, finish="", seconds=0.25
    )
    failed = ItemFailed(sequence=2, code="internal", detail="")
    experience.note_answer("target", Verified(target_life=1, results=(verdict, failed)), 0.5)
    item = ProposedItem(
        sequence=1, tokens=b"", context_rows=0, draft_seconds=0.5, ingest_seconds=0.25
    )
    experience.note_answer("draft", Proposed(target_life=1, results=(item,)), 0.875)
    experience.note_answer("target", Prefilled(target_life=1, results=()), 9.0)
    assert (costs.hand_over("target"), costs.hand_over("draft")) == (0.25, 0.125)
