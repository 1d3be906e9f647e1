"""A subset of the proofs in plain fp32: lossless up to rounding, and the reference's rounds."""

import dataclasses

import pytest
import torch
from support import proofs
from support.proof_prompts import MAX_TOKENS
from support.proof_reference import read_walks

from draft_daemon.golden import compare
from launch.golden import golden_ids
from launch.meeting import LEAST_AGREEMENT
from launch.tokenizer import TextTokenizer
from protocol.transports.base import GOLDEN_IDS, GOLDEN_ROWS

pytestmark = pytest.mark.timeout(300)  # a slow machine is no fault
TOKENS = MAX_TOKENS["own"]


@pytest.fixture(scope="module")
def runs(plain_pair, own_prompts):
    return proofs.generate(plain_pair, own_prompts, TOKENS, print)


def test_the_text_with_the_draft_differs_at_narrow_gaps_at_most(plain_pair, own_prompts, runs):
    found = proofs.lossless(plain_pair, own_prompts, runs)
    assert found.holds, found.differences
    assert found.run == len(own_prompts)


def test_every_round_emits_what_the_reference_packages_loop_emits(plain_pair, own_prompts, runs):
    found = proofs.acceptance(plain_pair, own_prompts, runs, read_walks(), TOKENS, allowed=0)
    assert (found.holds, found.identical) == (True, len(own_prompts)), found.differences


@pytest.mark.parametrize("change", [1, -1])
def test_a_round_of_another_length_is_a_difference_at_a_wide_gap(
    plain_pair, own_prompts, runs, change
):
    """Guards the test above: a draft that is wrong in one proposal does not pass."""
    prompt, walks = own_prompts[0], read_walks()
    rounds = list(walks[prompt.id].rounds)
    number = next(i for i, count in enumerate(rounds) if count + change in range(1, 8))
    place = sum(rounds[:number]) + min(rounds[number], rounds[number] + change)
    rounds[number] += change
    walks[prompt.id] = dataclasses.replace(walks[prompt.id], rounds=tuple(rounds))
    found = proofs.acceptance(plain_pair, own_prompts[:1], runs, walks, TOKENS, allowed=1)
    (difference,) = found.differences
    assert not found.holds
    assert (difference.logits_of, difference.position) == ("draft", place)
    assert difference.logit_gap > proofs.GAP


def test_another_text_is_laid_at_the_targets_door(plain_pair, own_prompts, runs):
    prompt, walks = own_prompts[0], read_walks()
    walk = walks[prompt.id]
    ids, rounds = list(walk.token_ids), list(walk.rounds)
    ids[1] += 1
    rounds[0] = 1 if rounds[0] > 1 else 2
    walks[prompt.id] = dataclasses.replace(walk, token_ids=tuple(ids), rounds=tuple(rounds))
    found = proofs.acceptance(plain_pair, own_prompts[:1], runs, walks, TOKENS, allowed=1)
    (difference,) = found.differences
    assert (difference.logits_of, difference.position) == ("target", 1)
    assert not found.holds


def test_a_walk_of_other_token_ids_is_refused(plain_pair, own_prompts, runs):
    walks = read_walks()
    prompt = dataclasses.replace(own_prompts[0], ids=own_prompts[1].ids)
    with pytest.raises(ValueError, match="other token ids"):
        proofs.acceptance(plain_pair, [prompt], runs, walks, TOKENS, allowed=0)


def test_the_golden_block_tells_the_right_draft_from_one_of_another_model(plain_pair, checkpoints):
    target, draft = plain_pair.target, plain_pair.draft
    ids = torch.tensor(golden_ids(TextTokenizer.load(checkpoints.model)))
    choices = target.verify_batch(0, ids, 0, "all").argmax(dim=-1)
    rows = target.ring.rows[0, : len(ids)].clone()
    weights = {GOLDEN_IDS: torch.stack((ids, choices)), GOLDEN_ROWS: rows}
    right = compare(weights, rows.shape[1], draft.first_tokens, window=len(rows))
    # As of another model of this shape, whose directions mean something else.
    order = torch.randperm(target.hidden_size, generator=torch.Generator().manual_seed(0))
    weights[GOLDEN_ROWS] = rows.unflatten(1, (-1, target.hidden_size))[..., order].flatten(1)
    other = compare(weights, rows.shape[1], draft.first_tokens, window=len(rows))
    assert right.compared == other.compared == len(ids) - 8
    assert right.agreed > 0.15 * right.compared
    assert other.agreed < LEAST_AGREEMENT * other.compared
