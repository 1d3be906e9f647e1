"""The choice function: its definition, its test vectors, and the distribution it promises."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import plain_choice
from support.samplings import samplings

from protocol import choice, noise
from protocol.choice import choose
from protocol.errors import UsageError
from protocol.messages import Sampling

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "sampling.md").read_text("utf-8")
VOCAB = 64
PROMPT = torch.arange(20)


def block_of(seed, rows=5, vocab=VOCAB, scale=2.0):
    """Logits on a grid of 1/8, so that there are ties."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * scale * 8).round() / 8


def expected(logits, position, sampling, history):
    history, chosen = history.tolist(), []
    for index, row in enumerate(logits.tolist()):
        chosen.append(plain_choice.choose_one(row, position + index, sampling, history))
        history.append(chosen[-1])
    return chosen


@settings(max_examples=300, deadline=None)
@given(samplings(VOCAB, len(PROMPT)), st.integers(0, 1000))
def test_every_row_is_chosen_as_the_document_defines(sampling, number):
    logits = block_of(number)
    assert choose(logits, 20, sampling, PROMPT).tolist() == expected(logits, 20, sampling, PROMPT)


@settings(max_examples=100, deadline=None)
@given(samplings(VOCAB, len(PROMPT)), st.integers(0, 1000), st.integers(1, 4))
def test_rows_do_not_depend_on_how_many_are_chosen_together(sampling, number, split):
    logits = block_of(number)
    before = logits.clone()
    whole = choose(logits, 20, sampling, PROMPT)
    head = choose(logits[:split], 20, sampling, PROMPT)
    tail = choose(logits[split:], 20 + split, sampling, torch.cat((PROMPT, head)))
    assert torch.equal(whole, torch.cat((head, tail)))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("scale", [0.2, 1.0, 4.0])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, seed=3),
        Sampling(temperature=0.8, top_p=0.95, seed=3),
        Sampling(temperature=0.8, top_p=0.9999, seed=3),
        Sampling(temperature=1.0, top_k=3000, seed=3),
        Sampling(temperature=1.3, min_p=0.001, seed=3),
    ],
)
def test_shortcuts_of_a_large_vocabulary_choose_what_all_candidates_would(sampling, scale):
    logits = block_of(1, rows=6, vocab=5000, scale=scale)
    assert choose(logits, 20, sampling, PROMPT).tolist() == expected(logits, 20, sampling, PROMPT)


@st.composite
def rows_of_any_shape(draw):
    """Logits [4, vocab]: flat and steep, with ties, banned ids, and some far above the rest."""
    generator = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    vocab = draw(st.sampled_from([3, 64, 700, 6000]))
    scale = draw(st.sampled_from([0.0, 0.05, 1.0, 2.0, 3.0, 50.0, 1e4, 1e9]))
    rows = generator.standard_normal((4, vocab)) * scale
    if draw(st.booleans()):
        rows = np.round(rows * 2) / 2
    rows[:, 1:][:, generator.random(vocab - 1) < draw(st.sampled_from([0.0, 0.0, 0.9]))] = -np.inf
    rows[:, generator.integers(vocab)] += draw(st.sampled_from([0.0, 0.0, 10.0, 1e5]))
    return torch.from_numpy(rows.astype(np.float32))


@settings(max_examples=400, deadline=None)
@given(
    rows=rows_of_any_shape(),
    sampling=st.builds(
        Sampling,
        temperature=st.sampled_from([1e-3, 0.3, 0.8, 1.0, 100.0]),
        top_k=st.sampled_from([0, 0, 0, 5, 1000]),
        top_p=st.sampled_from([1.0, 0.99999, 0.95, 0.95, 0.5, 0.01]),
        min_p=st.sampled_from([0.0, 0.0, 0.01, 0.5, 1.0]),
        frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
        seed=st.integers(0, (1 << 63) - 1),
    ),
)
def test_a_draw_before_the_filters_chooses_what_the_sorted_filters_leave(rows, sampling):
    """With an edge as wide as everything, each row is filtered first; with one cut, by sorting all.

    Noise for every candidate, and none left out by a bound on its bits, is the plainest way.
    """
    chosen = choose(rows, 20, sampling, PROMPT[:3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "EDGE", 1.0)
        patch.setattr(choice, "CUTS", ())
        patch.setattr(choice, "FEW", rows.shape[1])
        plainly = choose(rows, 20, sampling, PROMPT[:3])
    assert torch.equal(chosen, plainly)


@pytest.mark.parametrize("top_p", [0.95, 1.0])
@pytest.mark.parametrize("temperature", [1e-4, 0.8])
@pytest.mark.parametrize("highest", [1e8, 3e38])
def test_logits_between_which_float32_has_no_room_for_a_bound_are_chosen_from(
    highest, temperature, top_p
):
    logits = torch.full((2, 2000), -highest)
    logits[0, 5] = logits[1, 9] = highest
    for penalty in (1.0, 1.5):
        sampling = Sampling(
            temperature=temperature, top_p=top_p, repetition_penalty=penalty, seed=1
        )
        assert choose(logits, 20, sampling, PROMPT[:3]).tolist() == [5, 9]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("penalty", [1.0, 1.2])
def test_a_row_in_which_everything_is_banned_is_an_error_that_names_its_position(
    temperature, penalty
):
    vocab = block_of(2).shape[1]
    given = {"temperature": temperature, "repetition_penalty": penalty, "seed": 1}
    banned = Sampling(stop_token_ids=tuple(range(vocab)), min_tokens=30, **given)
    with pytest.raises(UsageError, match="no token can be chosen at position 20"):
        choose(block_of(2, rows=3), 20, banned, PROMPT)
    logits = block_of(2, rows=3)
    logits[1] = -math.inf
    with pytest.raises(UsageError, match="no token can be chosen at position 21"):
        choose(logits, 20, Sampling(**given), PROMPT)


def test_a_temperature_that_is_almost_0_is_0():
    logits = block_of(3)
    for temperature in (1e-6, 1e-300):
        cold = choose(logits, 20, Sampling(temperature=temperature), PROMPT)
        assert torch.equal(cold, choose(logits, 20, Sampling(), PROMPT))


# --- the document's vectors ----------------------------------------------------------------------


def _rows(columns):
    pattern = r"^\|" + r" `?([^|`]+?)`? \|" * columns + "$"
    return re.findall(pattern, DOCUMENT, re.MULTILINE)


def test_the_noise_has_the_published_vectors():
    rows = [row for row in _rows(7) if row[0].isdigit()]
    assert len(rows) == 6
    for seed, position, token, key, bits, uniform, gumbel in rows:
        stream = noise.stream(int(seed), int(position))
        random = noise.bits(stream, np.array([int(token)]))
        assert f"{stream:016x}" == key
        assert f"{int(random[0]):016x}" == bits
        assert noise.uniform(random)[0] == pytest.approx(float(uniform), abs=1e-14)
        assert noise.gumbel(random)[0] == pytest.approx(float(gumbel), abs=1e-11)


def test_the_choices_have_the_published_vectors():
    rows = [row for row in _rows(2) if row[0].startswith("temperature=")]
    assert len(rows) == 6
    logits = (torch.arange(VOCAB) * 37 % VOCAB / 8).repeat(8, 1)
    for words, ids in rows:
        pairs = (word.split("=") for word in words.split(", "))
        fields = {name: int(value) if value.isdigit() else float(value) for name, value in pairs}
        sampling = Sampling(prompt_tokens=20, **fields)
        assert choose(logits, 20, sampling, PROMPT).tolist() == [int(i) for i in ids.split()], words


def test_noise_is_never_infinite():
    ends = noise.gumbel(np.array([0, (1 << 64) - 1], dtype=np.uint64))
    assert np.isfinite(ends).all()
    assert (ends > -3.7).all()
    assert (ends < 36.8).all()


@given(st.floats(-3, 30))
def test_the_bound_on_bits_excludes_nothing_that_could_reach_the_noise(wanted):
    least = noise.least_bits(wanted)
    below = noise.gumbel(np.array([max(0, least - 1)], dtype=np.uint64))[0]
    assert below < wanted or least == 0
    assert below > wanted - 0.01 or wanted > 15 or least == 0


# --- the distribution ----------------------------------------------------------------------------

SEEDS = 20_000
CHAIN = block_of(5, rows=VOCAB, scale=1.2)  # row t: the logits after token t
SETTING = Sampling(temperature=0.9, top_k=40, top_p=0.9, min_p=0.01)


def _emitted(seeds):
    """First and third token of each seed's text over the chain, after a prompt that ends in 7."""
    counts = np.zeros((2, VOCAB))
    history = torch.zeros(0, dtype=torch.int64)
    for seed in range(seeds):
        sampling = Sampling(temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, seed=seed)
        token = 7
        for index in range(3):
            token = int(choose(CHAIN[token : token + 1], 20 + index, sampling, history)[0])
            if index != 1:
                counts[index // 2, token] += 1
    return counts


def _promised():
    """The two marginals, by the definition's filtered distribution."""
    step = np.zeros((VOCAB, VOCAB))
    for token in range(VOCAB):
        kept = plain_choice.distribution(CHAIN[token].tolist(), SETTING)
        step[token, list(kept)] = list(kept.values())
    return step[7], step[7] @ step @ step


def _surprise(counts, promised):
    """Standard deviations of the chi-squared statistic (Wilson and Hilferty), rare ids pooled."""
    want = promised * counts.sum()
    common = want >= 5
    if counts[want == 0].sum():
        return math.inf
    got = np.append(counts[common], counts[~common].sum())
    want = np.append(want[common], want[~common].sum())
    got, want = got[want > 0], want[want > 0]
    degrees = len(want) - 1
    ratio = ((got - want) ** 2 / want).sum() / degrees
    return (ratio ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))


@pytest.mark.slow
def test_emitted_tokens_are_distributed_as_the_filtered_target():
    first, third = _emitted(SEEDS)
    promised = _promised()
    assert abs(_surprise(first, promised[0])) < 4
    assert abs(_surprise(third, promised[1])) < 4


@pytest.mark.parametrize(
    "broken",
    [
        lambda random: np.zeros(len(random)),
        lambda random: noise.uniform(random) * 3,
        lambda random: -np.log(-np.log(noise.uniform(random))) * 0.7,
    ],
    ids=["none", "uniform", "too cold"],
)
def test_broken_noise_is_not(monkeypatch, broken):
    monkeypatch.setattr(noise, "gumbel", broken)
    first, third = _emitted(SEEDS // 4)
    assert _surprise(first, _promised()[0]) > 4
    assert _surprise(third, _promised()[1]) > 4


def test_positions_and_seeds_have_unrelated_noise():
    ids = np.arange(2000)
    streams = [noise.stream(seed, position) for seed in (0, 1, 2**40) for position in (0, 1, 999)]
    drawn = np.array([noise.uniform(noise.bits(key, ids)) for key in streams])
    correlation = np.corrcoef(drawn) - np.eye(len(drawn))
    assert np.abs(correlation).max() < 5 / math.sqrt(len(ids))
    assert np.abs(drawn.mean(axis=1) - 0.5).max() < 5 / math.sqrt(12 * len(ids))
