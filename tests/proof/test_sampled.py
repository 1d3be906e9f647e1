"""At a temperature, too, the default model's text is its own: the draft changes no id."""

import pytest
from support import proofs

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
TOKENS = 16


@pytest.mark.parametrize("first", range(0, len(proofs.SAMPLINGS), proofs.SHARE))
def test_ids_with_the_draft_equal_those_without(exact_pair, own_prompts, first):
    assert exact_pair.exact in ("native", "padded")
    samplings = proofs.SAMPLINGS[first : first + proofs.SHARE]
    found = proofs.sampled(exact_pair, own_prompts[:1], samplings, TOKENS, print)
    assert (found.holds, found.run, found.differences) == (True, proofs.SHARE, [])


def test_a_draft_that_is_never_right_proves_nothing(exact_pair, own_prompts):
    """Guards the proof itself: with one token wanted there is nothing to propose."""
    with pytest.raises(AssertionError, match="nothing was proved"):
        proofs.sampled(exact_pair, own_prompts[:1], proofs.SAMPLINGS, 1, print)
