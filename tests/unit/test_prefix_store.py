"""The store of prefixes: by bytes, the least used one first out, and no text twice."""

import torch

from target_daemon.prefixes import Prefix, PrefixStore, common_length
from target_daemon.target import StateCopy

ONE = 8 * 10 + 4 * 10 * 6 + 4 * 3 * 5  # ids, state, rows


def prefix(first, *, length=10):
    tokens = torch.arange(first, first + length)
    return Prefix(tokens, StateCopy({"state": torch.zeros(length, 6)}), torch.zeros(3, 5), first)


def numbers(store):
    return [held.number for held in store]


def test_the_bytes_of_a_prefix_are_those_of_its_ids_state_and_rows():
    one = prefix(0)
    assert (one.bytes, one.committed, one.oldest) == (ONE, 10, 7)


def test_the_least_used_prefix_gives_way():
    store = PrefixStore(3 * ONE, cuttable=True)
    for first in (100, 200, 300):
        store.put(prefix(first))
    store.get(next(iter(store)))
    store.put(prefix(400))
    assert numbers(store) == [300, 100, 400]
    assert store.bytes == 3 * ONE


def test_what_is_larger_than_the_budget_costs_no_other_its_place():
    store = PrefixStore(2 * ONE, cuttable=True)
    store.put(prefix(100))
    store.put(prefix(200, length=60))
    assert not store.lasts(2 * ONE + 1)
    assert numbers(store) == [100]


def test_a_prefix_that_goes_on_from_another_takes_its_place_where_state_can_be_cut():
    store = PrefixStore(9 * ONE, cuttable=True)
    for length in (5, 10, 7):
        if not store.knows(torch.arange(100, 100 + length)):
            store.put(prefix(100, length=length))
    assert [held.committed for held in store] == [10]


def test_state_that_cannot_be_cut_is_kept_at_each_of_its_ends():
    store = PrefixStore(9 * ONE, cuttable=False)
    for length in (5, 10, 7, 10):
        if not store.knows(torch.arange(100, 100 + length)):
            store.put(prefix(100, length=length))
    assert [held.committed for held in store] == [5, 7, 10]


def test_the_common_beginning_of_two_texts_is_counted():
    one = torch.tensor([1, 2, 3])
    assert [
        common_length(one, torch.tensor(other)) for other in ([], [2], [1, 2], [1, 2, 4, 3])
    ] == [
        0,
        0,
        2,
        2,
    ]
    assert common_length(one, torch.tensor([1, 2, 3, 4])) == 3
