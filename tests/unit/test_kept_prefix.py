"""A prompt continued where an earlier one left its state: as if it had been run whole."""

import pytest
import torch
from support.engines import CHUNK, PROMPT
from support.kept_pair import CONTEXT, LONG, PIECE, WINDOW, held, kept_pair
from support.tiny_pair import VOCAB
from support.toy_target import AttentionTarget, RecurrentTarget

from launch.events import TargetFacts
from launch.inprocess import run_spec_decode
from protocol.errors import UsageError
from protocol.messages import CloseItem, OpenItem
from target_daemon.checks import Limits
from target_daemon.engine import Engine

TOKENS = 12


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with kept_pair(tmp_path_factory.mktemp("kept") / "pair") as made:
        yield made


CUTS = [0, 1, CONTEXT - 1, CONTEXT, 45, 60, len(LONG) - 1, len(LONG)]


@pytest.mark.parametrize("cut", CUTS)
def test_text_and_rounds_after_a_hit_equal_those_of_the_whole_run(pair, cut):
    """The first prompt is another from `cut` on; the second begins like it up to there."""
    other = LONG[:cut] + [VOCAB - 2 - token for token in LONG[cut:]]
    whole = pair.run(LONG, TOKENS, speculative=True)
    assert whole.kept == 0
    pair.run(other, 1, speculative=True, retain=True)
    hit = pair.run(LONG, TOKENS, speculative=True, base_pos=len(LONG))
    lost = cut < len(other) - PIECE  # further back than the ring's guard reaches
    at = max(0, cut - WINDOW) if lost else min(cut, len(LONG) - 1)
    assert hit.kept == at - at % PIECE
    assert (hit.token_ids, hit.rounds, hit.proposed) == (
        whole.token_ids,
        whole.rounds,
        whole.proposed,
    )


def test_a_conversation_runs_only_what_is_new(pair):
    first = pair.run(LONG[:40], TOKENS, speculative=True, retain=True)
    turn = [*LONG[:40], *first.token_ids, *LONG[50:70]]
    hit = pair.run(turn, TOKENS, speculative=True, base_pos=51)
    whole = pair.run(turn, TOKENS, speculative=True)
    assert hit.kept == 48  # 51 positions had state: up to the last boundary of chunks
    assert (hit.token_ids, hit.rounds, hit.proposed) == (
        whole.token_ids,
        whole.rounds,
        whole.proposed,
    )


def test_a_draft_that_knows_nothing_reads_the_window_that_was_kept(pair):
    """Also after a restart of the draft: the feature rows were kept with the state."""
    pair.run(LONG[:60], 1, speculative=False, retain=True)
    hit = pair.run(LONG, TOKENS, speculative=True, base_pos=60)
    whole = pair.run(LONG, TOKENS, speculative=True)
    assert hit.kept == 60 - 60 % PIECE
    assert (hit.token_ids, hit.proposed) == (whole.token_ids, whole.proposed)


def test_the_state_after_a_hit_is_bit_for_bit_that_of_the_whole_run(pair):
    text = pair.run(LONG, TOKENS, speculative=True, retain=True).token_ids
    length = len(LONG) + len(text) - 1
    expected = held(pair, 0, length)
    pair.run(LONG[:48], 1, speculative=True, retain=True)  # in the other slot
    pair.run(LONG, TOKENS, speculative=True, base_pos=30, retain=True)
    for one, other in zip(held(pair, 1, length), expected, strict=True):
        assert torch.equal(one, other)


def test_another_text_shares_nothing(pair):
    pair.run(LONG, TOKENS, speculative=True, retain=True)
    assert pair.run(LONG[::-1], 3, speculative=True, base_pos=80).kept == 0


def test_the_oldest_state_gives_way_when_no_slot_is_empty(pair):
    first, second, third = LONG[:40], LONG[40:80], LONG[50:]
    for prompt in (first, second):
        pair.run(prompt, 1, speculative=True, retain=True)
    pair.run(third, 1, speculative=True)
    assert pair.run(second, 1, speculative=True, base_pos=40).kept == 36
    assert pair.run(first, 1, speculative=True, base_pos=40).kept == 0


@pytest.mark.parametrize("base", [-1, len(PROMPT) + 1])
def test_a_base_outside_the_prompt_is_refused_with_both_numbers(base):
    target = Engine(AttentionTarget(), Limits(CHUNK, 8))
    with pytest.raises(UsageError, match=f"base_pos {base}; the prompt has 10 tokens"):
        run_spec_decode(target, None, PROMPT, 3, facts=FACTS, base_pos=base)


# --- targets that keep no row per position


FACTS = TargetFacts(1, 40, 96, CHUNK, 200, 8)


def continued(target, prompt, *, sequence, **options):
    engine = options.pop("engine", None) or Engine(target, Limits(CHUNK, 8, "replay"))
    settings = {"facts": FACTS, "sequence": sequence} | options
    return engine, run_spec_decode(engine, None, prompt, 10, **settings)


@pytest.mark.parametrize("base", [0, 3, 4, 9, len(PROMPT)])
def test_rows_of_positions_are_continued_from_a_boundary_of_chunks(base):
    target = AttentionTarget()
    engine, first = continued(target, PROMPT, sequence=1, retain=True)
    on = continued(target, PROMPT, engine=engine, sequence=2, base_pos=base)[1]
    assert on.token_ids == first.token_ids
    assert on.statistics.num_kept_tokens == min(base, len(PROMPT) - 1) // CHUNK * CHUNK


def test_a_recurrent_state_is_continued_where_it_ended_and_nowhere_else():
    target = RecurrentTarget()
    engine, first = continued(target, PROMPT, sequence=1, retain=True)
    turn = [*PROMPT, *first.token_ids, 3, 1, 4, 1, 5]
    cold = continued(RecurrentTarget(), turn, sequence=1)[1]
    _, hit = continued(target, turn, engine=engine, sequence=2, base_pos=len(turn), retain=True)
    assert hit.token_ids == cold.token_ids
    assert hit.statistics.num_kept_tokens == len(PROMPT) + 9  # all but the pending token
    _, again = continued(target, turn, engine=engine, sequence=3, base_pos=5)
    assert again.token_ids == cold.token_ids
    assert again.statistics.num_kept_tokens == 0


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("end", range(1, 9))
def test_a_stop_string_inside_the_last_forward_leaves_the_state_up_to_there(end, fast):
    """The forward's rows cannot be dropped one by one: its start is kept until the next message."""
    plain = continued(RecurrentTarget(), PROMPT, sequence=1)[1].token_ids
    hints = dict(enumerate(plain))
    seen = []

    def find_stop(ids):
        left = end - len(seen)
        seen.extend(ids)
        return left if left <= len(ids) else None

    target = RecurrentTarget(fast=fast)
    engine = Engine(target, Limits(CHUNK, 8))
    options = {"engine": engine, "hint_tokens": hints, "find_stop": find_stop, "retain": True}
    _, first = continued(target, PROMPT, sequence=1, **options)
    assert first.token_ids == plain[:end]
    state = target.now[0].clone()
    fresh = RecurrentTarget()
    known = torch.tensor([*PROMPT, *plain[: end - 1]])
    fresh.verify_batch(0, known, 0, "none")
    torch.testing.assert_close(state, fresh.now[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("error", [RuntimeError("gone"), None])
def test_a_state_that_cannot_be_cut_is_given_up(error, monkeypatch):
    target = RecurrentTarget()
    engine = Engine(target, Limits(CHUNK, 8))
    _, first = continued(target, PROMPT, engine=engine, sequence=1, retain=True)
    turn = [*PROMPT, *first.token_ids, 3]
    engine.open(OpenItem(sequence=2, prefix=b""))
    engine.close(CloseItem(sequence=2, keep=1, retain=True))  # more than it holds

    if error is not None:

        def cut(slot, length):
            raise error

        monkeypatch.setattr(target, "supports_cut", True)
        monkeypatch.setattr(target, "cut", cut)
    _, hit = continued(target, turn, engine=engine, sequence=3, base_pos=7)
    assert hit.statistics.num_kept_tokens == 0
    assert hit.token_ids == continued(RecurrentTarget(), turn, sequence=1)[1].token_ids
