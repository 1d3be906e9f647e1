"""A subset of the proofs with ``--exact``: the project's own prompts, few tokens."""

import dataclasses

import pytest
from support import proofs

pytestmark = pytest.mark.timeout(300)  # a slow machine is no fault
TOKENS = 24
PROMPTS = 3


@pytest.fixture(scope="module")
def prompts(own_prompts):
    return own_prompts[:PROMPTS]


@pytest.fixture(scope="module")
def runs(exact_pair, prompts):
    return proofs.generate(exact_pair, prompts, TOKENS, print)


def test_the_real_pair_is_exact_in_fp32_when_that_is_asked_for(exact_pair):
    assert exact_pair.exact in ("native", "padded")


def test_the_text_with_the_draft_is_the_targets_own_on_every_prompt(exact_pair, prompts, runs):
    found = proofs.lossless(exact_pair, prompts, runs)
    assert (found.holds, found.identical, found.differences) == (True, PROMPTS, [])


def test_the_draft_does_take_part(runs):
    rounds = [both.speculative.rounds for both in runs.values()]
    assert sum(map(len, rounds)) < sum(map(sum, rounds))
    assert all(set(both.autoregressive.rounds) == {1} for both in runs.values())


@pytest.mark.process
def test_two_real_daemons_emit_that_same_text(checkpoints, exact_pair, prompts, runs, threads):
    given = {"dtype": "float32", "exact": True, "threads": threads}
    few = prompts[:2]
    found = proofs.through_daemons(checkpoints, exact_pair, few, runs, TOKENS, say=print, **given)
    assert (found.holds, found.identical, found.differences) == (True, len(few), [])


def test_a_wrong_token_is_a_difference_at_a_wide_gap_and_the_proof_fails(exact_pair, prompts, runs):
    """Guards the proof itself: it can fail, and says where."""
    both = runs[prompts[0].id]
    ids = list(both.speculative.token_ids)
    ids[5] += 1
    spoilt = dataclasses.replace(both.speculative, token_ids=tuple(ids))
    found = proofs.lossless(
        exact_pair, prompts, {**runs, prompts[0].id: dataclasses.replace(both, speculative=spoilt)}
    )
    (difference,) = found.differences
    assert not found.holds
    assert (difference.prompt, difference.position) == (prompts[0].id, 5)
    assert difference.logit_gap > proofs.GAP
