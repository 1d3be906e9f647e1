"""Log-probabilities are those of the raw logits, whatever sampling does to them."""

import math

import pytest
import torch
from support.drive import prefill, unpack
from support.engines import CHUNK, END, PROMPT, block, engine_over
from support.toy_target import AttentionTarget

from protocol.messages import LEAST_LOGPROB, OpenItem, Sampling
from target_daemon.logprobs import raw_logprobs


def test_an_entry_holds_the_chosen_and_the_likeliest_with_ties_by_id():
    logits = torch.tensor([[0.0, 1.0, 1.0, -2.0, 1.0], [9.0, 0.0, 0.0, 0.0, -math.inf]])
    first, second = raw_logprobs(logits, (0, 1), (3, 4), 2)
    scores = torch.log_softmax(logits[0].double(), -1).tolist()
    assert (first.logprob, first.ids) == (pytest.approx(scores[3]), (1, 2))
    assert first.logprobs == pytest.approx((scores[1], scores[2]))
    assert (second.logprob, second.ids) == (LEAST_LOGPROB, (0, 1))


def test_none_are_computed_unless_asked_for_and_no_more_than_there_are():
    logits = torch.zeros(1, 3)
    assert raw_logprobs(logits, (0,), (1,), -1) == ()
    (bare,) = raw_logprobs(logits, (0,), (1,), 0)
    assert (bare.logprob, bare.ids) == (pytest.approx(math.log(1 / 3)), ())
    assert raw_logprobs(logits, (0,), (1,), 20)[0].ids == (0, 1, 2)


@pytest.mark.parametrize("rollback", ["fast", "replay"])
def test_every_emitted_token_has_its_own_also_inside_a_block(rollback):
    sampling = Sampling(temperature=0.7, top_k=4, repetition_penalty=1.2, seed=5, logprobs=3)
    engine = engine_over(AttentionTarget(), rollback=rollback)
    engine.open(OpenItem(sequence=1, sampling=sampling))
    first = prefill(engine, 1, PROMPT, CHUNK)
    found, text = list(first.logprobs), [first.token]
    for number in range(1, 4):
        base = END + len(text) - 1
        probe = engine.verify(block([text[-1]], base=base, number=2 * number - 1))
        drafts = unpack(probe.tokens)
        text, found = text + drafts, found + list(probe.logprobs)
        verdict = engine.verify(block([text[-1], 1, 2], base=base + 1, number=2 * number))
        text, found = text + unpack(verdict.tokens), found + list(verdict.logprobs)
    assert len(found) == len(text)
    plain = AttentionTarget()
    ids = torch.tensor([*PROMPT, *text])
    scores = plain.verify_batch(0, ids, 0, "all")[END - 1 : -1].double().log_softmax(-1)
    for entry, row, token in zip(found, scores, text, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-5)
        assert list(entry.logprobs) == pytest.approx(row.topk(3).values.tolist(), abs=1e-5)
