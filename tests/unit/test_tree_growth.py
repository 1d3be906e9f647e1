"""Trees as they are grown: their form, their weights, and how many branches pay."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.costs import Costs
from launch.draft_side import Block
from launch.events import DraftFacts, TargetFacts
from launch.shapes import (
    ALTERNATIVES,
    IDLE,
    NO_ROOM,
    TOO_SMALL,
    UNPAID,
    Room,
    Trees,
    shape_for,
    slots_of,
)
from launch.token_ids import pack_ids, unpack_ids
from launch.tree import LEAST, Ranks, Slot, grow
from protocol.trees import check_siblings, depths

TARGET = TargetFacts(1, 100, 500, 32, 128, 32, tree_verify=True)
DRAFT = DraftFacts(1, 8, 64, top_k=16)


def plain(slot, rank, logprob):
    return logprob


@st.composite
def all_slots(draw):
    slots = []
    for _ in range(draw(st.integers(1, 7))):
        ids = draw(st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True))
        logprobs = sorted(draw(st.floats(-9.0, 0.0)) for _ in ids)[::-1]
        slots.append(Slot(tuple(ids), tuple(logprobs)))
    return slots


def paths(tree):
    """Every row's ids from the root down."""
    found = [()]
    for token, parent in zip(tree.ids, tree.parents, strict=True):
        found.append((*found[parent], token))
    return found[1:]


@given(all_slots(), st.integers(0, 7), st.integers(1, 40))
def test_a_tree_has_its_chain_first_parents_before_children_and_no_more_than_its_budget(
    slots, chain, nodes
):
    tree = grow(slots, chain, nodes, plain)
    assert len(tree.ids) == len(tree.parents) == len(tree.chances) <= nodes
    levels = depths(tree.parents)
    assert max(levels, default=0) <= len(slots)
    check_siblings([0, *tree.ids], tree.parents)
    seeded = min(chain, len(slots), nodes)
    whole = tuple(slot.ids[0] for slot in slots)
    grown = paths(tree)
    for length in range(1, seeded + 1):  # every prefix of the chain is there, as the first rows
        assert grown[length - 1] == whole[:length]
    for row in range(1, len(levels)):
        assert tree.ids[row - 1] in slots[levels[row] - 1].ids
    possible = math.prod(len(slot.ids) for slot in slots)
    if possible >= nodes:
        assert len(tree.ids) == nodes or len(tree.ids) >= possible


@given(all_slots(), st.integers(1, 12))
def test_no_tree_of_its_size_is_likelier_than_the_best_first_one(slots, nodes):
    tree = grow(slots, 0, nodes, plain)
    every = sorted(_chances(slots, 0.0), reverse=True)
    assert sorted(tree.chances, reverse=True) == pytest.approx(every[: len(tree.ids)])
    assert list(tree.chances) == sorted(tree.chances, reverse=True)


def _chances(slots, weight):
    if not slots:
        return
    for logprob in slots[0].logprobs:
        yield math.exp(weight + logprob)
        yield from _chances(slots[1:], weight + logprob)


def test_a_rate_begins_as_the_drafts_and_becomes_the_measured_one():
    ranks, slot = Ranks(), Slot((4, 5, 6), (math.log(0.6), math.log(0.3), math.log(0.05)))
    assert ranks.weigh(0, 1, math.log(0.3)) == pytest.approx(math.log(0.3))
    source = random.Random(1)
    for _ in range(600):  # the target takes the second half of the time, at slot 0 alone
        ranks.note([slot, slot], [4 if source.random() < 0.5 else 5, 9])
    rates = [math.exp(ranks.weigh(0, rank, slot.logprobs[rank])) for rank in range(3)]
    assert rates == pytest.approx([0.5, 0.5, 0.0], abs=0.1)
    assert math.exp(ranks.weigh(1, 0, slot.logprobs[0])) < 0.05
    assert ranks.weigh(1, 0, -1e9) == math.log(LEAST)


def test_a_rate_follows_a_text_that_has_changed():
    ranks, slot = Ranks(), Slot((4, 5), (math.log(0.5), math.log(0.5)))
    for _ in range(1000):
        ranks.note([slot], [4])
    for _ in range(1000):
        ranks.note([slot], [5])
    assert ranks.weigh(0, 0, math.log(0.5)) < ranks.weigh(0, 1, math.log(0.5)) - 2


# --- shapes ----------------------------------------------------------------------------------


def offered(chain=3, few=3, slots=5):
    """A draft's block of `slots`, of which the chain has `chain`."""
    ids = [10 * slot + rank for slot in range(1, slots + 1) for rank in range(few)]
    best = ids[::few]
    return Block(
        offered=pack_ids(best),
        top_ids=pack_ids(ids),
        top_logprobs=tuple([math.log(0.6), math.log(0.3), math.log(0.1)][:few] * slots),
        proposed=pack_ids(best[:chain]),
    )


def test_a_hint_or_a_guess_stands_alone_in_its_slot():
    block = offered()
    block.proposed = pack_ids([10, 77, 30, 40, 50, 66])
    slots = slots_of(block)
    assert [slot.ids for slot in slots] == [
        (10, 11, 12),
        (77,),
        (30, 31, 32),
        (40, 41, 42),
        (50, 51, 52),
        (66,),
    ]


def test_a_block_without_alternatives_stays_a_chain():
    shape, block = Trees(Ranks(), 9), offered(few=1)
    for empty in (Block(proposed=pack_ids([1, 2])), Block()):
        shape.complete(empty, Room(10, 9, 32))
        assert empty.parents == b""
    shape.complete(block, Room(10, 3, 32))
    assert block.parents == b""
    shape.note([10])


def test_a_tree_is_as_wide_as_its_budget_and_as_deep_as_the_text_goes_on():
    shape, block = Trees(Ranks(), 9), offered()
    shape.complete(block, Room(10, 9, 32))
    parents = unpack_ids(block.parents)
    assert len(parents) == len(unpack_ids(block.proposed)) == 9
    assert unpack_ids(block.proposed)[:3] == (10, 20, 30)
    shallow = offered(chain=2)
    shape.complete(shallow, Room(10, 2, 32))
    assert max(depths(unpack_ids(shallow.parents))) == 2
    narrow = offered()
    shape.complete(narrow, Room(10, 9, 6))
    assert len(unpack_ids(narrow.proposed)) == 5
    long = offered(chain=5)
    shape = Trees(Ranks(), 3)
    shape.complete(long, Room(10, 9, 32))
    assert (long.parents, len(unpack_ids(long.proposed))) == (b"", 5)
    assert (shape.rows(6), shape.shape()) == (6, ("chain", TOO_SMALL.format(3, 5)))
    shape = Trees(Ranks(), 9)
    shape.complete(offered(), Room(10, 9, 32))
    assert (shape.rows(6), shape.shape()) == (10, ("tree", ""))


def test_a_tree_that_was_asked_for_and_had_nothing_to_branch_from_says_so():
    for costs in (None, Costs()):  # as with `tree` and with `auto`
        shape = Trees(Ranks(), 9, costs)
        assert shape.shape() == ("chain", NO_ROOM)
        assert shape.top_k(TARGET, None) == 0  # a round without its draft
        shape.complete(Block(proposed=pack_ids([1, 2])), Room(10, 9, 32))
        assert shape.shape() == ("chain", NO_ROOM)
    one = Trees(Ranks(), 1, Costs())
    one.complete(offered(), Room(10, 9, 32))
    assert one.shape() == ("chain", TOO_SMALL.format(1, 3))


def priced(per_row):
    costs = Costs()
    for rows in (1, 16):
        costs.verify.note(rows, 0, 1.0 + (rows - 1) * per_row)
    return costs


def test_auto_takes_branches_where_they_pay_and_only_those():
    free, dear = (Trees(Ranks(), 12, priced(per_row)) for per_row in (0.0, 1.0))
    wide, narrow = offered(), offered()
    free.complete(wide, Room(10, 9, 32))
    dear.complete(narrow, Room(10, 9, 32))
    assert len(unpack_ids(wide.parents)) == 12
    assert narrow.parents == b""
    some = offered()
    Trees(Ranks(), 12, priced(0.08)).complete(some, Room(10, 9, 32))
    assert 3 < len(unpack_ids(some.parents)) < 12
    unknown = offered()
    Trees(Ranks(), 12, Costs()).complete(unknown, Room(10, 9, 32))
    assert len(unpack_ids(unknown.parents)) == 12


def test_where_no_branch_pays_alternatives_are_asked_for_rarely_and_still():
    shape = Trees(Ranks(), 12, priced(1.0))
    asked = []
    for _ in range(10 * IDLE):
        asked.append(shape.top_k(TARGET, DRAFT))
        block = offered()
        if asked[-1]:
            shape.complete(block, Room(10, 9, 32))
    assert asked[:IDLE] == [ALTERNATIVES] * IDLE
    assert asked.count(ALTERNATIVES) == IDLE + 9
    assert shape.shape() == ("chain", UNPAID)


@pytest.mark.parametrize(
    ("target", "draft", "words"),
    [
        (TargetFacts(1, 100, 500, 32, 128, 32, tree_detail="not here"), DRAFT, "not here"),
        (TargetFacts(1, 100, 500, 32, 128, 32), DRAFT, "this target verifies chains only"),
        (TARGET, DraftFacts(1, 8, 64), "this draft has one token for each slot"),
    ],
)
def test_what_cannot_be_a_tree_is_a_chain_and_says_why(target, draft, words):
    shape = shape_for("auto", 9, Ranks(), Costs())
    assert shape.top_k(target, draft) == 0
    assert shape.shape() == ("chain", words)
    assert shape.rows(4) == 4
    assert shape.top_k(target, None) == 0


def test_a_chain_asks_for_nothing_and_is_left_alone():
    shape, block = shape_for("chain", 9, Ranks(), Costs()), offered()
    assert (shape.top_k(TARGET, DRAFT), shape.rows(4)) == (0, 4)
    shape.complete(block, Room(10, 9, 32))
    shape.note([10])
    assert (block.parents, shape.shape()) == (b"", ("chain", ""))
