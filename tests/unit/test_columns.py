"""Where a tree's rows lie so that attention keeps its bits: the rule, and how it is measured."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trees import path_of

from protocol.errors import ProtocolError
from protocol.trees import check_siblings, depths, is_path
from target_daemon import columns
from target_daemon.columns import NOWHERE, Columns, settle
from target_daemon.exactness import AttentionShape

SHAPE = AttentionShape(kv_heads=1, group=2, head_dim=8, capacity=1024, dtype=torch.float32)


@st.composite
def trees(draw):
    rows = draw(st.integers(1, 24))
    return [draw(st.integers(0, row - 1)) for row in range(1, rows)]


@given(trees(), st.integers(0, 1500), st.sampled_from([(), (256,), (384, 448)]))
@settings(deadline=None)
def test_a_rows_column_meets_the_same_lanes_in_the_same_cell_behind_its_parents(
    parents, base, bounds
):
    rule = Columns(16, bounds)
    places = rule.place(base, parents)
    assert places[0] == 0
    used = [place for place in places if place != NOWHERE]
    assert len(set(used)) == len(used)
    for row, depth in enumerate(depths(parents)):
        if places[row] == NOWHERE:
            continue
        assert (places[row] - depth) % 16 == 0
        assert rule._cell(base + places[row]) == rule._cell(base + depth)
        assert all(a < b for a, b in pairwise(places[at] for at in path_of(row, parents)))


@given(trees(), st.integers(0, 1500))
@settings(deadline=None)
def test_the_first_row_of_each_depth_in_a_chain_has_its_natural_column(parents, base):
    chain = len(parents)
    places = Columns(16, (256,)).place(base, [*range(chain), *parents])
    assert places[: chain + 1] == tuple(range(chain + 1))


@given(trees(), st.integers(0, 1500), st.sampled_from([(), (256,), (384, 448)]))
@settings(deadline=None)
def test_the_rows_that_have_places_keep_them_alone(parents, base, bounds):
    rule = Columns(16, bounds)
    places = rule.place(base, parents)
    rows = [row for row, place in enumerate(places) if place != NOWHERE]
    at = {row: index for index, row in enumerate(rows)}
    again = rule.place(base, [at[parents[row - 1]] for row in rows[1:]])
    assert again == tuple(places[row] for row in rows)


def test_without_a_stride_rows_lie_one_behind_the_other():
    assert Columns().place(500, [0, 0, 1, 0]) == (0, 1, 2, 3, 4)


def test_the_measured_rule_keeps_every_bit_of_attention():
    rule = settle(SHAPE, 64, (1, 8, 12))
    assert rule is not None
    assert rule.stride in columns.STRIDES
    # A rule that forgets the bounds, or moves to other lanes, is told apart.
    probe = columns._Probe(SHAPE, 64, (1, 8, 12))
    assert all(probe.keeps(rule, base) for base in probe.bases)
    assert not all(probe.keeps(Columns(3), base) for base in probe.bases)
    assert not all(probe.moves(column, column + 1) for column in range(100, 110))


def test_attention_that_depends_on_every_column_has_no_rule(monkeypatch):
    def attend(query, key, value, mask, scale):
        weights = mask[0, 0, :, :].exp()
        return query + (weights * torch.arange(key.shape[2])).sum(-1)[None, None, :, None]

    monkeypatch.setattr(columns, "attend_folded", attend)
    assert settle(SHAPE, 64, (8,)) is None


@pytest.mark.parametrize("parents", [[1], [0, 2], [0, 1, 3], [-1]])
def test_a_row_before_its_parent_is_no_tree(parents):
    with pytest.raises(ProtocolError, match="of a tree follows row"):
        depths(parents)


def test_siblings_must_differ():
    check_siblings([9, 4, 4], [0, 1])
    with pytest.raises(ProtocolError, match="token 4 follows row 0 of a tree more than once"):
        check_siblings([9, 4, 4], [0, 0])


@pytest.mark.parametrize(
    ("path", "right"),
    [
        ([0], True),
        ([0, 1, 3], True),
        ([0, 2], True),
        ([], False),
        ([1], False),
        ([0, 3], False),
        ([0, 1, 2], False),
        ([0, 4], False),
        ([0, 0], False),
    ],
)
def test_a_path_goes_down_from_the_root(path, right):
    assert is_path(path, [0, 0, 1]) is right
