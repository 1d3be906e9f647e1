"""At a temperature, too, and with trees, the default model's text is its own."""

import pytest
from support import proofs

from protocol.messages import Sampling

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
TOKENS = 16


def test_ids_with_the_draft_equal_those_without(exact_pair, own_prompts):
    """One prompt with each of the samplings: something is accepted in them all together."""
    assert exact_pair.exact in ("native", "padded")
    prompts = own_prompts[:1] * len(proofs.SAMPLINGS)
    found = proofs.sampled(exact_pair, prompts, proofs.SAMPLINGS, TOKENS, print)
    assert (found.holds, found.run, found.differences) == (True, len(prompts), [])


def test_ids_of_trees_equal_those_without_a_draft(exact_pair, own_prompts):
    samplings = (Sampling(), proofs.SAMPLINGS[0])
    prompts = own_prompts[: len(samplings)]
    found = proofs.trees(exact_pair, prompts, samplings, TOKENS, print)
    assert (found.holds, found.run, found.differences) == (True, len(prompts), [])


def test_a_draft_that_is_never_right_proves_nothing(exact_pair, own_prompts):
    """Guards the proof itself: with one token wanted there is nothing to propose."""
    with pytest.raises(AssertionError, match="nothing was proved"):
        proofs.sampled(exact_pair, own_prompts[:1], proofs.SAMPLINGS, 1, print)
