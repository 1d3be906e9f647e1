"""The text of a seed does not depend on the draft, the width, a hint, or a draft that dies."""

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drive import generate
from support.engines import CHUNK, PROMPT, guesser, oracle
from support.samplings import samplings
from support.toy_target import AttentionTarget, RecurrentTarget

from launch.events import TargetFacts
from launch.inprocess import run_spec_decode
from launch.policy import AUTO, FULL
from launch.token_ids import pack_ids
from protocol.errors import InternalError
from protocol.messages import (
    ClosedItem,
    IngestedItem,
    OpenedItem,
    ProposedItem,
    Sampling,
)
from target_daemon.checks import Limits
from target_daemon.engine import Engine

KINDS = [AttentionTarget, RecurrentTarget]
VOCAB, WIDEST, TOKENS = 40, 8, 24
EOS = (11, 29)
END_OF = {"budget": "length", "stop": "stop"}
FACTS = TargetFacts(1, VOCAB, 96, CHUNK, 200, WIDEST)
WARM = Sampling(temperature=0.9, top_p=0.95, frequency_penalty=0.3, seed=77, ignore_eos=True)


def engine(kind=AttentionTarget, rollback="fast"):
    return Engine(kind(vocab_size=VOCAB, eos=EOS), Limits(CHUNK, WIDEST, rollback))


def alone(sampling, kind=AttentionTarget):
    """The target's own text: one token at a time."""
    text, _, finish = generate(engine(kind), PROMPT, TOKENS, chunk=CHUNK, sampling=sampling)
    return text, finish


class Guesses:
    """A draft engine that is right three times in four, and dies after `lives` proposals."""

    def __init__(self, text, seed=0, lives=10**9):
        self.draft, self.lives = guesser(seed, text, PROMPT), lives
        self.text = text

    def open(self, item):
        return OpenedItem(sequence=item.sequence, round=item.round, slot=item.slot)

    def ingest(self, item):
        return IngestedItem(
            sequence=item.sequence, round=item.round, start=0, stop=item.stop, seconds=0.0
        )

    def propose(self, item):
        self.lives -= 1
        if self.lives < 0:
            raise InternalError("it died")
        known = [*PROMPT, *self.text][: item.base_pos + 1]
        return ProposedItem(
            sequence=item.sequence,
            round=item.round,
            tokens=pack_ids(self.draft(known, item.width - 1)),
            context_rows=0,
            draft_seconds=0.0,
            ingest_seconds=0.0,
        )

    def close(self, item):
        return ClosedItem(sequence=item.sequence, round=item.round, committed=0)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50, deadline=None)  # 200 on a tiny model: test_any_way
@given(
    sampling=samplings(VOCAB),
    width=st.integers(2, WIDEST),
    rollback=st.sampled_from(["fast", "replay"]),
    luck=st.integers(0, 99),
)
def test_ids_with_a_draft_equal_those_without(kind, sampling, width, rollback, luck):
    text, finish = alone(sampling, kind)
    got, rounds, ended = generate(
        engine(kind, rollback),
        PROMPT,
        TOKENS,
        chunk=CHUNK,
        width=width,
        drafter=guesser(luck, text, PROMPT),
        sampling=sampling,
    )
    assert (got, ended) == (text, finish)
    assert sum(rounds) == len(text) - 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_a_seed_has_one_text_at_every_width_and_seeds_have_different_ones(kind, seed):
    sampling = Sampling(temperature=1.0, top_k=20, seed=seed)
    text, finish = alone(sampling, kind)
    assert text != alone(Sampling(temperature=1.0, top_k=20, seed=seed + 1), kind)[0]
    for drafts in (0, 1, 3, 7):
        drafter = guesser(seed, text, PROMPT)
        got, _, ended = generate(
            engine(kind),
            PROMPT,
            TOKENS,
            chunk=CHUNK,
            width=drafts + 1,
            drafter=drafter,
            sampling=sampling,
        )
        assert (got, ended) == (text, finish), drafts


@pytest.mark.parametrize("lives", [0, 1, 2, 4])
def test_a_draft_that_dies_in_the_middle_changes_no_token(lives):
    text, _ = alone(WARM)
    result = run_spec_decode(
        engine(),
        Guesses(text, lives=lives),
        PROMPT,
        TOKENS,
        facts=FACTS,
        block_width=FULL,
        block_size=6,
        sampling=WARM,
    )
    assert list(result.token_ids) == text
    assert result.statistics.num_drafts >= lives
    assert "it died" in result.statistics.mode_reason


@settings(max_examples=60, deadline=None)
@given(
    hints=st.dictionaries(st.integers(0, TOKENS), st.integers(0, VOCAB - 1)),
    right=st.sets(st.integers(0, TOKENS - 1)),
    drafted=st.booleans(),
    ngram=st.sampled_from(("auto", "always", "never")),
    block_width=st.sampled_from([AUTO, 1, 2, FULL]),
)
def test_hints_and_ngrams_right_or_wrong_change_no_token_at_any_width(
    hints, right, drafted, ngram, block_width
):
    text, _ = alone(WARM)
    result = run_spec_decode(
        engine(),
        Guesses(text) if drafted else None,
        PROMPT,
        TOKENS,
        facts=FACTS,
        block_size=6,
        sampling=WARM,
        hint_tokens=hints | {index: text[index] for index in right},
        ngram=ngram,
        block_width=block_width,
    )
    assert list(result.token_ids) == text


def test_right_hints_alone_make_rounds_of_the_widest_block_also_at_a_temperature():
    text, _ = alone(WARM)
    result = run_spec_decode(
        engine(),
        None,
        PROMPT,
        TOKENS,
        facts=FACTS,
        sampling=WARM,
        hint_tokens=dict(enumerate(text)),
    )
    assert list(result.token_ids) == text
    assert result.statistics.num_rounds == 3  # 1 + 3 x 8 > 24
    assert result.num_accepted_hint_tokens == TOKENS - 1 - 3


@pytest.mark.parametrize("width", [1, 4, 8])
@pytest.mark.parametrize("least", [0, 3, 9, 30])
def test_no_end_comes_before_the_least_number_of_tokens(width, least):
    eager = Sampling(logit_bias=((EOS[0], 100.0), (5, 50.0)), stop_token_ids=(5,), min_tokens=least)
    text, finish = alone(eager)
    assert (len(text), finish) == ((least + 1, "stop") if least < TOKENS else (TOKENS, "length"))
    assert {5, *EOS}.isdisjoint(text[:least])
    drafter = guesser(3, text, PROMPT)
    got = generate(
        engine(), PROMPT, TOKENS, chunk=CHUNK, width=width, drafter=drafter, sampling=eager
    )
    assert (got[0], got[2]) == (text, finish)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rollback", ["fast", "replay"])
@pytest.mark.parametrize("end", range(1, 12))
@pytest.mark.parametrize("how", ["budget", "stop"])
def test_after_any_end_the_state_is_that_of_a_fresh_prefill(kind, rollback, end, how):
    """A stop inside an accepted block, or the budget's end, leaves no row of what lay behind."""
    text, _ = alone(WARM, kind)
    first = text.index(text[end - 1]) + 1  # the stop token may come earlier, too
    stops = (text[end - 1],) if how == "stop" else ()
    sampling = msgspec.structs.replace(WARM, stop_token_ids=stops)
    target = kind(vocab_size=VOCAB, eos=EOS)
    got, _, finish = generate(
        Engine(target, Limits(CHUNK, WIDEST, rollback)),
        PROMPT,
        end if how == "budget" else TOKENS,
        chunk=CHUNK,
        width=WIDEST,
        drafter=oracle(text, PROMPT, right=WIDEST),
        sampling=sampling,
        close=False,
    )
    assert (got, finish) == (text[: end if how == "budget" else first], END_OF[how])
    known = torch.tensor([*PROMPT, *got])
    fresh = kind(vocab_size=VOCAB, eos=EOS)
    expected = fresh.verify_batch(0, known, 0, "last")
    state = target.verify_batch(0, known[-1:], len(known) - 1, "last")
    assert torch.allclose(state, expected, atol=1e-5, rtol=0)
