"""At a temperature, too, the default model's text is its own: the draft changes no id."""

import pytest

from protocol.messages import Sampling

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
TOKENS = 24
SAMPLINGS = [
    Sampling(temperature=0.7, top_p=0.95, seed=3),
    Sampling(temperature=1.0, top_k=50, repetition_penalty=1.1, seed=4),
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"temperature {s.temperature}")
def test_ids_with_the_draft_equal_those_without(exact_pair, own_prompts, sampling):
    assert exact_pair.exact in ("native", "padded")
    prompt = own_prompts[0].ids
    alone = exact_pair.run(prompt, TOKENS, speculative=False, sampling=sampling)
    drafted = exact_pair.run(prompt, TOKENS, speculative=True, sampling=sampling)
    assert drafted.token_ids == alone.token_ids
    assert len(drafted.rounds) < len(alone.rounds)  # at least one proposal was accepted
