"""Any sampling, for property tests."""

from hypothesis import strategies as st

from protocol.messages import Sampling


def samplings(vocab, prompt_tokens=0):
    """Any combination of parameters, the neutral value of each often among them."""
    ids = st.integers(0, vocab - 1)

    def maybe(neutral, *others):
        return st.one_of(st.just(neutral), *others)

    return st.builds(
        Sampling,
        logit_bias=maybe(
            (), st.lists(st.tuples(ids, st.floats(-5, 5, width=32)), max_size=3).map(tuple)
        ),
        eos_token_ids=maybe((), st.lists(ids, max_size=3).map(tuple)),
        stop_token_ids=maybe((), st.lists(ids, max_size=3).map(tuple)),
        ignore_eos=st.booleans(),
        min_tokens=st.sampled_from([0, 0, 2, 5]),
        prompt_tokens=st.just(prompt_tokens),
        repetition_penalty=st.sampled_from([1.0, 1.0, 0.8, 1.3]),
        presence_penalty=st.sampled_from([0.0, 0.0, 0.5, -0.5]),
        frequency_penalty=st.sampled_from([0.0, 0.0, 0.25]),
        temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.5]),
        top_k=st.sampled_from([0, 0, 1, 5, 40, 1000]),
        top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.01]),
        min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5]),
        seed=st.integers(0, (1 << 63) - 1),
    )
