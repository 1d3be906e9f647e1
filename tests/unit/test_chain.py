"""Which rows of a block a chain keeps: design section 8, rule 1, on logits made by hand."""

import pytest
import torch

from protocol.messages import Sampling
from target_daemon.verify.base import Block, Rules
from target_daemon.verify.chain import STRATEGY

VOCAB = 20


def judge(drafts, chosen, *, budget=100, stops=()):
    ids = (7, *drafts)
    logits = torch.zeros(len(ids), VOCAB)
    logits[range(len(ids)), chosen] = 1.0
    rules = Rules(Sampling(), frozenset(stops), budget, torch.arange(11))
    return STRATEGY.judge(Block(10, ids, torch.tensor(ids)), logits, rules)


@pytest.mark.parametrize(
    ("drafts", "chosen", "emitted"),
    [
        ([], [3], (3,)),
        ([3], [3, 4], (3, 4)),
        ([3], [5, 4], (5,)),
        ([3, 4, 5], [3, 4, 5, 6], (3, 4, 5, 6)),
        ([3, 4, 5], [3, 9, 5, 6], (3, 9)),
        ([3, 4, 5], [9, 4, 5, 6], (9,)),
    ],
)
def test_the_longest_agreeing_prefix_and_one_more_token_are_kept(drafts, chosen, emitted):
    kept = judge(drafts, chosen)
    assert kept.emitted == emitted
    assert kept.path == tuple(range(len(emitted)))
    assert kept.chosen == tuple(chosen)
    assert kept.finish == ""


@pytest.mark.parametrize(
    ("budget", "emitted", "finish"),
    [
        (1, (3,), "length"),
        (3, (3, 4, 5), "length"),
        (4, (3, 4, 5, 6), "length"),
        (5, (3, 4, 5, 6), ""),
    ],
)
def test_the_budget_cuts_an_accepted_block(budget, emitted, finish):
    kept = judge([3, 4, 5], [3, 4, 5, 6], budget=budget)
    assert (kept.emitted, kept.finish) == (emitted, finish)
    assert len(kept.path) == len(emitted)


@pytest.mark.parametrize(
    ("stops", "emitted"), [({3}, (3,)), ({4}, (3, 4)), ({6}, (3, 4, 5, 6)), ({5, 4}, (3, 4))]
)
def test_the_first_stop_token_inside_an_accepted_block_ends_it(stops, emitted):
    kept = judge([3, 4, 5], [3, 4, 5, 6], stops=stops)
    assert (kept.emitted, kept.finish) == (emitted, "stop")
    assert len(kept.path) == len(emitted)


def test_a_stop_token_behind_the_budget_is_not_seen():
    kept = judge([3, 4, 5], [3, 4, 5, 6], budget=2, stops={5})
    assert (kept.emitted, kept.finish) == ((3, 4), "length")


def test_a_stop_token_at_the_end_of_the_budget_is_a_stop():
    kept = judge([3, 4, 5], [3, 4, 5, 6], budget=2, stops={4})
    assert (kept.emitted, kept.finish) == ((3, 4), "stop")


def test_a_stop_token_that_was_only_drafted_ends_nothing():
    kept = judge([3, 4, 5], [3, 9, 5, 6], stops={4, 5})
    assert (kept.emitted, kept.finish) == ((3, 9), "")
