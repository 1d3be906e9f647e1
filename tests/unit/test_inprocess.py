"""The seed's function over the model pair: the target's own text, and honest figures."""

import itertools

import pytest
from support.model_pair import VOCAB, ModelDraft, ModelTarget, local_token, model_text

from launch.events import TargetFacts
from launch.inprocess import run_spec_decode
from launch.policy import AUTO, FULL
from launch.token_ids import unpack_ids
from protocol.errors import InternalError, PromptTooLong, UsageError
from protocol.messages import IngestItem

FACTS = TargetFacts(1, VOCAB, 200, 16, ModelTarget.capacity, 16)
PROMPT = list(range(1, 30))


def text_after(prompt, n_gen):
    return model_text(prompt, n_gen, -1)[0]


def decode(prompt=PROMPT, n_gen=40, *, drafted=True, luck=3, target=None, **options):
    target = target or ModelTarget(eos=-1)
    draft = ModelDraft(target, luck=luck) if drafted else None
    settings = {"facts": FACTS, "block_size": 6, "draft_context": 32, "block_width": FULL}
    settings |= options
    return run_spec_decode(target, draft, prompt, n_gen, **settings)


@pytest.mark.parametrize("drafted", [True, False])
def test_the_text_is_the_targets_own_with_and_without_a_draft(drafted):
    result = decode(drafted=drafted)
    assert list(result.token_ids) == text_after(PROMPT, 40)
    assert result.finish_reason == "length"
    assert result.statistics.mode == ("speculative" if drafted else "autoregressive")


def test_the_figures_add_up():
    pieces = []
    figures = decode(on_piece=pieces.append).statistics
    rounds = pieces[1:]
    drafted = [piece for piece in rounds if piece.proposed]
    accepted = [len(unpack_ids(piece.tokens)) - 1 for piece in drafted]
    assert (figures.prompt_tokens, figures.completion_tokens) == (len(PROMPT), 40)
    assert figures.num_rounds == len(rounds)
    assert figures.num_drafts == len(drafted) == sum(figures.acceptance_histogram)
    assert figures.num_accepted_tokens == sum(accepted) == sum(figures.num_accepted_tokens_per_pos)
    assert figures.num_draft_tokens == sum(figures.num_proposed_tokens_per_pos)
    assert list(figures.acceptance_histogram) == [accepted.count(n) for n in range(6)]
    assert figures.completion_tokens == 1 + figures.num_rounds + figures.num_accepted_tokens
    assert figures.verify_seconds == 0.25 * len(rounds)
    assert figures.draft_seconds == 0.0625 * len(drafted)
    assert figures.prefill_seconds == 2 * 0.5
    assert figures.overhead_seconds == 0.0  # the model's seconds are longer than the wall's


def test_hints_override_the_draft_are_verified_and_are_counted_apart():
    right = text_after(PROMPT, 40)
    hints = {index: right[index] for index in range(40)}
    hints[7] = right[7] % (VOCAB - 1) + 1  # one of them is wrong
    result = decode(luck=1, hint_tokens=hints)
    figures = result.statistics
    assert list(result.token_ids) == right
    assert result.num_accepted_hint_tokens == result.num_hint_tokens - 9  # the wrong one and behind
    assert figures.num_draft_tokens == figures.num_accepted_tokens == 0


@pytest.mark.parametrize("drafted", [True, False])
@pytest.mark.parametrize("wrong", [2, 9, 20, 33])
def test_a_wrong_hint_costs_the_tail_of_its_round_and_nothing_else(drafted, wrong):
    """Beside a draft that is always right there is this hint alone; without one, all others are."""
    right, pieces = text_after(PROMPT, 40), []
    hints = {wrong: right[wrong]} if drafted else dict(enumerate(right))
    known = {"drafted": drafted, "luck": 10**9, "block_width": AUTO}
    whole = decode(hint_tokens=hints, **known)
    hints[wrong] = right[wrong] % (VOCAB - 1) + 1
    result = decode(hint_tokens=hints, on_piece=pieces.append, **known)
    assert list(result.token_ids) == list(whole.token_ids) == right
    rounds = whole.statistics.num_rounds
    assert rounds <= result.statistics.num_rounds <= rounds + 1
    (cut,) = [piece for piece in pieces[1:] if len(unpack_ids(piece.tokens)) < piece.width]
    assert cut.position + len(unpack_ids(cut.tokens)) - 1 == len(PROMPT) + wrong


@pytest.mark.parametrize("width", [FULL, 4, AUTO])
def test_a_draft_is_not_asked_for_what_hints_would_override(width):
    right = text_after(PROMPT, 40)
    hints = dict(enumerate(right))
    figures = decode(hint_tokens=hints, block_width=width).statistics
    assert figures.draft_seconds == 0.0
    assert figures.mode == "speculative"
    del hints[19]  # the first block of 16 rows ends before it
    assert decode(hint_tokens=hints, block_width=width).statistics.draft_seconds > 0.0


@pytest.mark.parametrize("width", [FULL, AUTO])
def test_hints_that_are_wrong_are_left_and_the_draft_is_asked(width):
    right = text_after(PROMPT, 120)
    hints = {index: token % (VOCAB - 1) + 1 for index, token in enumerate(right)}
    result = decode(n_gen=120, hint_tokens=hints, block_width=width, luck=10**9)
    assert list(result.token_ids) == right
    assert result.num_accepted_hint_tokens == 0
    assert result.num_hint_tokens <= 6 * 15
    assert result.statistics.num_accepted_tokens > 80


def test_hints_are_taken_up_again_when_the_text_is_theirs():
    right = text_after(PROMPT, 120)
    hints = {index: token % (VOCAB - 1) + 1 for index, token in enumerate(right)}
    hints |= dict(enumerate(right[60:], 60))
    result = decode(n_gen=120, drafted=False, hint_tokens=hints)
    assert list(result.token_ids) == right
    assert result.num_accepted_hint_tokens > 40


def test_ngrams_take_the_place_of_hints_that_are_wrong():
    text = [index % 5 + 1 for index in range(80)]
    target = ModelTarget(eos=-1, model=lambda history, eos: history[-1] % 5 + 1)
    result = run_spec_decode(
        target,
        None,
        [9, 9, 5],
        80,
        facts=FACTS,
        block_width=AUTO,
        hint_tokens=dict.fromkeys(range(80), 7),
    )
    assert list(result.token_ids) == text
    assert result.statistics.num_accepted_ngram_tokens > 30


@pytest.mark.parametrize(
    "hints", [{0: 1}, {5000: 3}, {index: index % 5 + 1 for index in range(20)}]
)
def test_ngrams_go_on_where_hints_have_ended_or_never_come(hints):
    target = ModelTarget(eos=-1, model=lambda history, eos: history[-1] % 5 + 1)
    settings = {"facts": FACTS, "block_width": AUTO, "hint_tokens": hints}
    result = run_spec_decode(target, None, [9, 9, 5], 120, **settings)
    assert list(result.token_ids) == [index % 5 + 1 for index in range(120)]
    assert result.statistics.num_accepted_ngram_tokens > 60
    figures = result.statistics
    accepted = figures.num_accepted_tokens + figures.num_accepted_ngram_tokens
    assert 1 + figures.num_rounds + accepted + result.num_accepted_hint_tokens == 120


def test_at_a_fixed_width_too_a_draft_is_asked_as_soon_as_hints_are_left():
    right = text_after(PROMPT, 160)
    every = {index: token % (VOCAB - 1) + 1 for index, token in enumerate(right)}
    hints = every | {index: right[index] for index in range(0, 160, 3)}
    pieces = []
    result = decode(n_gen=160, hint_tokens=hints, luck=10**9, on_piece=pieces.append)
    assert list(result.token_ids) == right
    asked = [piece for piece in pieces if piece.draft_seconds]
    assert asked
    assert result.statistics.num_accepted_tokens >= 3 * len(asked)


def test_hints_alone_make_blocks_without_a_draft():
    right = text_after(PROMPT, 40)
    result = decode(drafted=False, hint_tokens=dict(enumerate(right)))
    assert list(result.token_ids) == right
    assert result.statistics.num_rounds == 3  # of at most 16 rows
    assert result.num_accepted_hint_tokens == 36


def test_a_hole_in_the_hints_is_filled_by_the_draft():
    right = text_after(PROMPT, 40)
    pieces = []
    decode(n_gen=7, luck=10**9, hint_tokens={1: right[1], 3: right[3]}, on_piece=pieces.append)
    assert [piece.width for piece in pieces] == [0, 6]


@pytest.mark.parametrize(
    ("prompt", "n_gen", "options", "error"),
    [
        ([], 5, {}, UsageError),
        (PROMPT, 0, {}, UsageError),
        ([1] * 200, 5, {}, PromptTooLong),
        (PROMPT, 5, {"hint_tokens": {0: VOCAB}}, UsageError),
        (PROMPT, 5, {"hint_tokens": {-1: 1}}, UsageError),
    ],
)
def test_what_cannot_run_is_refused_with_a_typed_error(prompt, n_gen, options, error):
    target = ModelTarget()
    with pytest.raises(error):
        decode(prompt, n_gen, target=target, **options)
    assert target.calls == []


def test_the_longest_prompt_leaves_room_for_one_token():
    result = decode([1] * 199, 5)
    assert (len(result.token_ids), result.finish_reason) == (1, "length")


def test_an_error_of_the_target_is_raised_and_the_sequence_closed():
    class Failing(ModelTarget):
        def verify(self, item):
            raise InternalError("this forward fails")

    target = Failing(eos=-1)
    with pytest.raises(InternalError, match="this forward fails"):
        decode(target=target)
    assert target.tokens == {}


def test_a_draft_that_fails_is_left_out_and_named():
    class Failing(ModelDraft):
        def propose(self, item):
            raise InternalError("this draft fails")

    target = ModelTarget(eos=-1)
    result = run_spec_decode(
        target, Failing(target), PROMPT, 20, facts=FACTS, block_size=6, draft_context=32
    )
    assert list(result.token_ids) == text_after(PROMPT, 20)
    assert result.statistics.mode_reason.endswith("the draft refused: this draft fails")


def nearly_periodic(history, eos):
    """1 to 5 again and again, with another token now and then."""
    return local_token(history, eos) if len(history) % 13 == 0 else history[-1] % 5 + 1


@pytest.mark.parametrize("luck", [None, 10**9])
def test_ngrams_change_no_token_and_are_counted_apart(luck):
    def run(*, ngram):
        target = ModelTarget(eos=-1, model=nearly_periodic)
        return decode(n_gen=120, drafted=luck is not None, luck=luck, target=target, ngram=ngram)

    result, plain = run(ngram="always"), run(ngram="never")
    figures = result.statistics
    assert result.token_ids == plain.token_ids
    assert figures.num_accepted_ngram_tokens > 0
    accepted = figures.num_accepted_tokens + figures.num_accepted_ngram_tokens
    assert figures.completion_tokens == 1 + figures.num_rounds + accepted
    assert figures.num_rounds < plain.statistics.num_rounds


def test_a_repetition_is_followed_by_ngrams_alone():
    class Periodic(ModelTarget):
        """Repeats 1 to 5."""

    target = Periodic(eos=-1, model=lambda history, eos: history[-1] % 5 + 1)
    result = decode([9, 9, 5], n_gen=60, drafted=False, target=target, ngram="always")
    figures = result.statistics
    assert list(result.token_ids) == [index % 5 + 1 for index in range(60)]
    assert figures.num_accepted_ngram_tokens >= 45
    assert figures.num_draft_tokens == figures.num_accepted_tokens == 0
    assert (figures.mode, figures.mode_reason) == (
        "speculative",
        "guesses alone: no draft was given",
    )


@pytest.mark.parametrize("drafted", [True, False])
@pytest.mark.parametrize("end", range(1, 12))
def test_a_stop_ends_the_text_anywhere_in_a_block_and_both_sides_close_there(drafted, end):
    right = text_after(PROMPT, 40)
    seen = []

    def find_stop(ids):
        left = end - len(seen)
        seen.extend(ids)
        return left if left <= len(ids) else None

    target, pieces = ModelTarget(eos=-1), []
    result = decode(
        luck=4, drafted=drafted, target=target, find_stop=find_stop, on_piece=pieces.append
    )
    assert list(result.token_ids) == right[:end]
    assert [t for piece in pieces for t in unpack_ids(piece.tokens)] == right[:end]
    assert (result.finish_reason, result.statistics.completion_tokens) == ("stop", end)
    assert target.calls[-1].keep == len(PROMPT) + end - 1
    figures = result.statistics  # nothing that was cut off counts as accepted
    assert end == 1 + figures.num_rounds + figures.num_accepted_tokens
    assert sum(figures.num_accepted_tokens_per_pos) == figures.num_accepted_tokens


def test_ngrams_replace_a_draft_that_is_wrong_for_longer_and_never_one_that_is_right():
    class Periodic(ModelTarget):
        """Repeats 1 to 5."""

    def run(luck):
        target = Periodic(eos=-1, model=lambda history, eos: history[-1] % 5 + 1)
        return decode([9, 9, 5], n_gen=80, luck=luck, target=target, ngram="always")

    bad, good = run(1), run(10**9)
    assert list(bad.token_ids) == list(good.token_ids) == [i % 5 + 1 for i in range(80)]
    figures = bad.statistics
    assert figures.num_accepted_tokens == 0
    assert figures.num_rounds < 40  # a draft that is never right alone costs 80
    assert figures.num_accepted_ngram_tokens > 40
    assert good.statistics.num_draft_tokens >= 5 * (good.statistics.num_rounds - 1)


@pytest.mark.parametrize("luck", [1, 2, 10**9])
@pytest.mark.parametrize("block_width", [AUTO, 1, 3, FULL])
def test_no_width_changes_a_token(luck, block_width):
    result = decode(n_gen=90, luck=luck, block_width=block_width)
    assert list(result.token_ids) == text_after(PROMPT, 90)


def test_the_figures_say_which_widths_were_used_and_why_not_the_draft():
    figures = decode(n_gen=120, luck=1, block_width=AUTO, ngram="never").statistics
    assert sum(figures.width_histogram) == figures.num_rounds
    assert figures.width_histogram[1] > 90
    assert figures.mode == "autoregressive"
    assert figures.mode_reason.startswith("drafting does not pay here: 1.")
    assert figures.num_draft_tokens < 100  # of 600


def test_a_draft_that_pays_is_used_at_its_best_width():
    figures = decode(n_gen=120, luck=10**9, block_width=AUTO, ngram="never").statistics
    assert (figures.mode, figures.mode_reason) == ("speculative", "")
    assert figures.width_histogram[6] > 10


def test_without_its_draft_a_long_text_keeps_the_drafts_context_up_to_date():
    target = ModelTarget(eos=-1)
    draft = ModelDraft(target, luck=1)
    settings = {"facts": FACTS, "block_size": 6, "draft_context": 32, "block_width": 1}
    result = run_spec_decode(target, draft, PROMPT, 90, **settings)
    stops = [item.stop for item in draft.calls if isinstance(item, IngestItem)]
    assert len(result.token_ids) == 90
    assert draft.gaps == 0
    half = (FACTS.ring_capacity - FACTS.prefill_chunk) // 2
    assert max(b - a for a, b in itertools.pairwise(stops)) <= half
