"""N-grams where they pay: what is found, what is learned of it, and when a round is theirs."""

import random

import pytest
from support.model_pair import VOCAB, ModelDraft, ModelTarget

from launch.auto_width import Experience
from launch.events import TargetFacts
from launch.hints import Guesses, with_guesses
from launch.inprocess import run_spec_decode
from launch.journal import Journal
from launch.lookups import Lookups, unknown
from launch.ngram import REACH
from launch.policy import AUTO, FULL, FixedWidth, Outcome, Situation
from launch.token_ids import pack_ids

FACTS = TargetFacts(1, VOCAB, 200, 16, ModelTarget.capacity, 16)
STEP = 0.02
NOW = Situation(1, 100, 0)


def journal(prompt, emitted=()):
    made = Journal(pack_ids(prompt))
    if emitted:
        made.emit(pack_ids(emitted))
    return made


def policy(seconds, experience=None):
    """The policy that learns, to which verifies of 1, 2, ... rows cost `seconds`."""
    experience = experience or Experience()
    for rows, each in enumerate(seconds, 1):
        experience.costs.verify.note(rows, 0, each)
    return experience.policy(AUTO)


def test_the_longest_run_decides_and_the_answer_stands_until_more_is_emitted():
    lookups = Lookups(unknown())
    text = journal([1, 2, 3, 4, 9, 2, 7], [1, 2])
    assert lookups.find(text, 3) == lookups.find(text, 3) == (3, 4, 9)
    text.emit(pack_ids([3]))
    assert lookups.find(text, 2) == (4, 9)
    assert Lookups(unknown()).find(journal([1, 2, 3]), 3) == ()


def test_nothing_is_expected_where_no_run_came_before():
    lookups = Lookups(unknown())
    lookups.find(journal([1, 2, 3]), 3)
    assert lookups.expected() == [1.0]


def test_a_long_prompt_is_searched_from_its_end():
    prompt = [5, 6, 7, *range(10, 10 + REACH), 5]
    assert Lookups(unknown()).find(journal(prompt), 2) == ()
    assert Lookups(unknown()).find(journal(prompt[2:]), 1) == ()
    assert Lookups(unknown()).find(journal([*prompt, 6, 5]), 1) == (6,)


@pytest.mark.parametrize(("emitted", "better"), [([3], True), ([3, 4, 5], True), ([8], False)])
def test_what_is_emitted_says_how_far_such_runs_are_right_for_this_request_and_the_next(
    emitted, better
):
    shared = unknown()
    text = [1, 2, 3, 4, 5, 6, 1, 2]
    found = []
    for _ in range(2):
        lookups = Lookups(shared)
        lookups.find(journal(text), 3)
        found.append(lookups.expected()[-1])
        for _ in range(5):
            lookups.find(journal(text), 3)
            lookups.judge(emitted)
        lookups.find(journal(text), 3)
        found.append(lookups.expected()[-1])
    assert (found[1] > found[0]) is better
    assert (found[2] > found[0]) is better
    assert shared[2].count > shared[3].count  # runs of other lengths are another matter


@pytest.mark.parametrize(
    ("growth", "tokens", "rows"),
    [
        (0.0, [1.0, 1.6, 1.9, 2.0], 4),
        (0.5, [1.0, 1.9, 2.6, 2.9], 3),
        (1.0, [1.0, 1.9, 2.7, 3.4], 1),
        (0.0, [1.0, 1.01, 1.02, 1.02], 1),
    ],
)
def test_as_many_rows_are_verified_as_emit_most_in_their_time(growth, tokens, rows):
    seconds = [STEP * (1 + growth * row) for row in range(4)]
    assert policy(seconds).rows_for(tokens, NOW) == rows


def test_the_rival_is_a_step_at_the_same_position_also_where_no_draft_was_ever_asked():
    experience, late = Experience(), Situation(1, 100, 8000)
    for rows, seconds in ((1, 0.010), (16, 0.012)):
        experience.costs.verify.note(rows, 0, seconds)
        experience.costs.verify.note(rows, late.position, 2 * seconds)
    chosen = experience.policy(AUTO)
    chosen.choose(late)
    assert chosen.rows_for([1.0, 1.6, 1.9, 2.1], late) == 4


def test_a_verify_that_took_no_time_is_a_price_like_any_other():
    experience = Experience()
    experience.costs.verify.note(1, 0, STEP)
    experience.costs.verify.note(16, 0, 0.0)
    assert experience.policy(AUTO).rows_for([1.0 + row for row in range(16)], NOW) == 16


@pytest.mark.parametrize(
    ("guessed", "drafted", "said"),
    [
        (7, 0, "guesses alone: "),
        (7, 6, "guesses more than drafts: "),
        (7, 7, "guesses beside drafts: "),
    ],
)
def test_the_reason_says_who_made_the_proposals(guessed, drafted, said):
    left = ("autoregressive", "why")
    assert with_guesses(left, 0, drafted) == left
    assert with_guesses(left, guessed, drafted) == ("speculative", f"{said}why")
    assert with_guesses(("speculative", ""), guessed, drafted) == ("speculative", "")


def test_a_fixed_width_and_a_step_of_unknown_price_have_no_round_of_ngrams():
    assert Experience().policy(AUTO).rows_for([1.0, 2.0], NOW) == 1
    assert FixedWidth(FULL).rows_for([1.0, 2.0], NOW) == 1


def test_the_round_is_the_drafts_where_the_draft_brings_more():
    experience = Experience()
    chosen = policy([STEP] * 6, experience)
    experience.costs.draft.note(6, 0, STEP / 10)
    now, sure = Situation(6, 100, 0), (0.95,) * 5
    for _ in range(3):
        chosen.choose(now)
        chosen.note(
            Outcome(0, 6, tuple(range(5)), 5, tuple(range(6)), STEP / 10, 0.0, 1, STEP, sure)
        )
    assert chosen.choose(now).verify == 6
    assert chosen.rows_for([1.0, 1.5, 1.75], now) == 1
    assert chosen.rows_for([1.0 + row for row in range(9)], now) == 9


def decoded(tokens, seconds, texts):
    """Seconds of decoding `texts` of such tokens one by one, over those with n-grams."""
    experience, alone, taken = Experience(), 0.0, 0.0
    for text in range(texts):
        told = tokens(text)
        chosen, lookups = policy(seconds, experience), Lookups(experience.lookups)
        known, at = journal(told[:20], told[20:21]), 20
        while at < len(told) - 1:
            most = min(len(seconds), len(told) - 1 - at)
            ids = lookups.find(known, most - 1)
            rows = chosen.rows_for(lookups.expected(), NOW) if ids else 1
            right = 0
            while right < rows - 1 and told[at + 1 + right] == ids[right]:
                right += 1
            emitted = told[at + 1 : at + 2 + right]
            lookups.judge(emitted)
            known.emit(pack_ids(emitted))
            at, taken = at + len(emitted), taken + seconds[rows - 1]
            alone += seconds[0] * len(emitted)
    return alone / taken


DEAR = [STEP * growth for growth in (1, 1.42, 1.42, 1.52, 1.65, 1.8, 1.9, 2.0)]  # fp32, 2 cores


@pytest.mark.parametrize("ids", [4, 30, 300])
@pytest.mark.parametrize("seconds", [DEAR, [STEP * (1 + 0.02 * row) for row in range(8)]])
def test_texts_that_only_chance_repeats_cost_a_twentieth_at_the_most(ids, seconds):
    def tokens(text):
        return random.Random(text).choices(range(ids), k=150)

    assert decoded(tokens, seconds, 4) > 0.95


def test_texts_that_repeat_themselves_for_a_while_are_decoded_faster():
    def tokens(text):
        parts = [random.Random(100 * text + at // 2).choices(range(300), k=25) for at in range(8)]
        return [token for part in parts for token in part]

    assert decoded(tokens, DEAR, 4) > 1.25


def test_hints_and_a_width_that_was_asked_for_leave_no_room_for_them():
    text = journal([1, 2, 3, 1, 2])
    learning = policy([STEP] * 4)
    for hints, mode, chosen, rows in (
        ({}, "auto", learning, 4),
        ({}, "auto", FixedWidth(FULL), 1),
        ({}, "never", learning, 1),
        ({}, "always", learning, 1),
        ({5: 1}, "auto", learning, 1),
    ):
        assert Guesses(hints, mode, unknown()).rows(chosen, NOW, text, 4) == rows


class Periodic(ModelTarget):
    """Repeats 1 to 5."""


@pytest.mark.parametrize("drafted", [True, False])
def test_a_text_that_repeats_itself_is_decoded_in_blocks_without_asking_the_draft(drafted):
    def run(**options):
        target = Periodic(eos=-1, model=lambda history, eos: history[-1] % 5 + 1)
        draft = ModelDraft(target, luck=1) if drafted else None
        settings = {"facts": FACTS, "block_size": 6, "draft_context": 32}
        result = run_spec_decode(target, draft, [9, 9, 5], 80, **(settings | options))
        assert list(result.token_ids) == [index % 5 + 1 for index in range(80)]
        return result.statistics

    figures, never, fixed = run(), run(ngram="never"), run(block_width=3)
    assert figures.num_accepted_ngram_tokens > 40
    assert figures.num_rounds < 40
    assert figures.mode_reason.startswith("guesses alone: " if not drafted else "")
    assert never.num_ngram_tokens == fixed.num_ngram_tokens == 0
    assert never.num_rounds > 60
