"""What the draft engine chooses at a temperature, and the likeliest ids that it states."""

import msgspec
import pytest
import torch
from support.draft_bench import Bench
from support.drive import unpack
from support.tiny_draft import (
    SPECULATORS,
    Features,
    merged,
    uniform,
)

from draft_daemon.head import Borrowed
from draft_daemon.likeliest import likeliest, with_noise
from protocol.choice import choose
from protocol.errors import (
    UsageError,
)
from protocol.messages import OpenItem, ProposeItem, Sampling

HOT = (0.0, 2.0, 5.0, 10.0)


@pytest.fixture
def bench(tmp_path):
    with Bench(tmp_path) as made:
        yield made


WARM = Sampling(temperature=2.0, top_p=0.9, seed=21, repetition_penalty=1.5, min_tokens=9)
PARTS = (0.0, 2.0, 1.0, 2.0, 0.5)


def drawn(logits, first):
    """By the one choice function, each slot at its own temperature and position."""
    found = []
    for index, (row, part) in enumerate(zip(logits, PARTS, strict=True)):
        sampling = Sampling(temperature=part, top_p=0.9, seed=21)
        nothing = torch.zeros(0, dtype=torch.int64)
        found.append(int(choose(row[None], first + index, sampling, nothing)))
    return found


def test_each_slot_is_chosen_at_its_temperature_with_the_noise_of_its_position(bench):
    features = bench.sequence(sampling=WARM)
    features.write(0, 8)
    tokens = bench.tokens(8, temperatures=PARTS)
    assert tokens == drawn(bench.scores(features, 8), 9)
    assert tokens != bench.expected(features, 8)
    assert bench.tokens(8) == bench.expected(features, 8)  # without temperatures: the best


def test_the_noise_belongs_to_the_targets_ids_also_with_a_vocabulary_of_ones_own(tmp_path):
    ids = torch.tensor([2, 30, 31, 64, 95])
    own = uniform((5, 32), 77)
    extra = {"lm_head.weight": own, "d2t": ids - torch.arange(5)}
    with Bench(tmp_path, merged(SPECULATORS, draft_vocab_size=5), extra=extra) as bench:
        features = bench.sequence(sampling=WARM)
        features.write(0, 8)
        logits = torch.full((5, 96), -torch.inf)
        logits[:, ids] = bench.scores(features, 8, scores=own)
        assert bench.tokens(8, temperatures=PARTS) == drawn(logits, 9)
        bench.engine._lexicon = Borrowed(bench.draft, bench.guest.weights(), 96, 1.0, 0.5)
        logits[:, ids] = 0.5 * torch.tanh(logits[:, ids] / 0.5)  # and the others stay out
        assert bench.tokens(8, temperatures=PARTS) == drawn(logits, 9)


def test_the_targets_scale_and_cap_count_where_noise_is_added(bench):
    features = bench.sequence(sampling=WARM)
    features.write(0, 8)
    capped = Borrowed(bench.draft, bench.guest.weights(), 96, 3.0, 4.0)
    plain, bench.engine._lexicon = bench.engine._lexicon, capped
    logits = 4 * torch.tanh(bench.scores(features, 8) * 3 / 4)
    assert bench.tokens(8, temperatures=PARTS) == drawn(logits, 9)
    bench.engine._lexicon = plain


def test_temperatures_for_other_slots_than_asked_for_are_refused(bench):
    bench.sequence().write(0, 8)
    with pytest.raises(UsageError, match="2 temperatures for 5 tokens"):
        bench.propose(8, temperatures=(0.5, 0.5))


@pytest.mark.parametrize("layout", ["head_t", "head"])
def test_alternatives_are_the_likeliest_ids_with_their_log_probabilities(tmp_path, layout):
    with Bench(tmp_path, layout=layout) as bench:
        bench.sequence().write(0, 9)
        plain = bench.propose(9)
        item = ProposeItem(sequence=1, round=3, base_pos=9, pending=7, width=6, top_k=4)
        found = bench.engine.propose(item)
        assert (found.tokens, plain.top_ids) == (plain.tokens, b"")
        ids = torch.tensor(unpack(found.top_ids)).view(5, 4)
        assert ids[:, 0].tolist() == unpack(plain.tokens)
        logprobs = torch.tensor(found.top_logprobs).view(5, 4)
        every = bench.engine.propose(msgspec.structs.replace(item, top_k=16))
        more = torch.tensor(every.top_logprobs).view(5, 16)
        assert torch.equal(torch.tensor(unpack(every.top_ids)).view(5, 16)[:, :4], ids)
        assert more.diff().le(0).all()
        assert more.exp().sum(1).le(1.0001).all()
        assert torch.equal(more[:, :4], logprobs)


def test_more_alternatives_than_an_answer_holds_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("draft_daemon.engine.MAX_ALTERNATIVES", 19)
    with Bench(tmp_path) as bench:
        bench.sequence().write(0, 4)
        item = ProposeItem(sequence=1, base_pos=4, pending=7, width=6, top_k=4)
        with pytest.raises(UsageError, match="4 ids at 5 slots; 19 fit an answer"):
            bench.engine.propose(item)


@pytest.mark.parametrize(
    ("rows", "vocab", "count"), [(3, 200, 8), (1, 64, 5), (2, 40, 7), (2, 3, 9)]
)
def test_the_likeliest_are_those_of_the_whole_distribution(rows, vocab, count):
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[:, 1] = logits[:, 0]  # equals: the lower id is first
    ids, logprobs = likeliest(logits, count)
    scores, order = logits.log_softmax(-1).sort(descending=True, stable=True)
    assert torch.equal(ids, order[:, :count])
    torch.testing.assert_close(logprobs, scores[:, :count])


@pytest.mark.parametrize(
    "sampling",
    [Sampling(seed=3), Sampling(seed=5, top_p=0.8), Sampling(seed=6, top_k=4, min_p=0.01)],
)
def test_with_noise_the_first_alternative_is_what_the_choice_would_be(sampling):
    scores = 3 * torch.randn(40, 300, generator=torch.Generator().manual_seed(1))
    heat = [0.0, 0.7] * 20
    ids, logprobs = with_noise(scores, 6, 17, sampling, heat)
    assert ids.shape == logprobs.shape == (40, 6)
    right = 0
    for row, temperature in enumerate(heat):
        assert len(set(ids[row].tolist())) == 6
        assert logprobs[row].diff().le(0).all() or temperature
        one = msgspec.structs.replace(sampling, temperature=temperature)
        right += int(
            choose(scores[row : row + 1], 17 + row, one, torch.empty(0, dtype=torch.int64))
        ) == int(ids[row, 0])
    assert right >= 38  # the winner may lie outside those that race, or a filter's edge differ


def test_alternatives_at_a_temperature_begin_with_the_token_that_is_proposed(tmp_path):
    with Bench(tmp_path) as bench:
        sampling = Sampling(temperature=1.0, seed=9)
        bench.engine.open(OpenItem(sequence=1, slot=0, sampling=sampling))
        Features(bench.ring, slot=0, sequence=1).write(0, 9)
        heat = {"temperatures": (1.0,) * 5}
        item = ProposeItem(sequence=1, base_pos=9, pending=7, width=6, **heat)
        drawn = bench.engine.propose(item)
        found = bench.engine.propose(msgspec.structs.replace(item, top_k=5))
        first = unpack(found.top_ids)[::5]
        assert first == unpack(found.tokens)
        agreed = sum(one == other for one, other in zip(first, unpack(drawn.tokens), strict=True))
        assert agreed >= 4
