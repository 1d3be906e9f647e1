"""`--verify auto` takes chains, trees or neither: what emits most by measured rates and costs."""

import math
import random
from itertools import takewhile

import pytest

from launch.auto_width import Experience
from launch.draft_side import Block
from launch.events import DraftFacts, TargetFacts
from launch.policy import AUTO, Outcome, Situation
from launch.shapes import Gain, Room
from launch.token_ids import WIDTH, pack_ids, unpack_ids

BLOCK, FEW, TOKENS, WIDEST = 8, 4, 1500, 16
TARGET = TargetFacts(1, 100_000, 5000, 32, 6000, WIDEST, tree_verify=True)
DRAFT = DraftFacts(1, BLOCK, 64, top_k=FEW)
# P(the right token is the draft's best, its second, its third): a chain has the first alone.
RANKS = (0.30, 0.25, 0.15)


def slot(source, right):
    """Ids of one slot, of which `right` is the target's, if it is there at all."""
    ids = [50_000 + source.randrange(40_000) for _ in range(FEW)]
    drawn = source.random()
    for rank, rate in enumerate(RANKS):
        if 0 <= drawn < rate:
            ids[rank] = right
        drawn -= rate
    return ids


def block_for(choice, manner, source, at):
    """A round's block: position ``p`` of the text has token ``p + 1``."""
    block, shape = Block(), manner.shape
    if choice.propose > 1:
        slots = [slot(source, at + place + 2) for place in range(choice.propose - 1)]
        block.offered = pack_ids([ids[0] for ids in slots])
        if choice.verify > 1 and shape.top_k(TARGET, DRAFT):
            block.top_ids = pack_ids([one for ids in slots for one in ids])
            block.top_logprobs = tuple(math.log(rate) for rate in (*RANKS, 0.05)) * len(slots)
    rows = manner.policy.cut(choice, ())
    block.proposed = block.offered[: (rows - 1) * WIDTH]
    block.chain = len(block.proposed) // WIDTH
    shape.complete(block, Room(at, TOKENS, WIDEST))
    return block


def accepted(block, at):
    """How many tokens a path of the block has right, and how many its chain."""
    ids = unpack_ids(block.proposed)
    chain = sum(1 for _ in takewhile(lambda i: ids[i] == at + i + 2, range(block.chain)))
    parents = unpack_ids(block.parents) or tuple(range(len(ids)))
    children = {edge: row for row, edge in enumerate(zip(parents, ids, strict=True), start=1)}
    row, depth = 0, 0
    while (row, at + depth + 2) in children:
        row, depth = children[row, at + depth + 2], depth + 1
    return depth, chain


def decode(verify, per_row, draft, seed=0):
    """Seconds of a text of `TOKENS` tokens where a step is 1; how many rounds were trees."""
    source, experience = random.Random(seed), Experience()
    manner = experience.manner(AUTO, verify, WIDEST - 1)
    at, seconds, trees = 0, 0.0, 0
    while at < TOKENS:
        choice = manner.policy.choose(Situation(BLOCK, TOKENS, 0))
        block = block_for(choice, manner, source, at)
        rows = len(block.proposed) // WIDTH + 1
        depth, chain = accepted(block, at)
        tokens = tuple(range(at + 2, at + depth + 3))
        prices = (draft if choice.propose > 1 else 0.0, 1 + per_row * (rows - 1))
        manner.policy.note(
            Outcome(
                position=0,
                rows=rows,
                offered=unpack_ids(block.offered),
                drafted=block.chain,
                tokens=tokens[: chain + 1],
                draft_seconds=prices[0],
                ingest_seconds=0.0,
                ingested=0,
                verify_seconds=prices[1],
            )
        )
        manner.shape.note(tokens)
        at, seconds, trees = at + depth + 1, seconds + sum(prices), trees + bool(block.parents)
    return seconds, trees


def test_a_draft_is_used_where_its_chains_do_not_pay_and_its_trees_do():
    chain, _ = decode("chain", 0.02, 0.5)
    auto, trees = decode("auto", 0.02, 0.5)
    assert chain > 0.98 * TOKENS  # no faster than one token at a time
    assert auto < 0.83 * TOKENS
    assert trees > 500


def test_where_rows_are_dear_neither_is_used():
    auto, trees = decode("auto", 0.5, 0.4)
    assert auto < TOKENS / 0.95
    assert trees < 20


def test_a_gain_is_a_mean_that_follows():
    gain = Gain()
    assert gain.value == 1.0
    for _ in range(30):
        gain.note(1.5)
    assert gain.value == pytest.approx(1.5)
    for _ in range(30):
        gain.note(1.0)
    assert gain.value < 1.02
