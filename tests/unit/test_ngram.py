"""N-grams propose what followed the last tokens when they came before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.ngram import NgramLookup


def lookup(ids):
    ngram = NgramLookup()
    ngram.extend(ids)
    return ngram


def slow(ids, guessed, count, shortest):
    """By looking at every place from the last one on."""
    whole = [*ids, *guessed]
    for length in range(min(5, len(whole)), shortest - 1, -1):
        tail = whole[-length:]
        for start in range(len(ids) - 1, length - 1, -1):
            if ids[start - length : start] == tail:
                for index in range(count):
                    whole.append(whole[start + index])
                return whole[len(ids) + len(guessed) :]
    return []


@pytest.mark.parametrize(
    ("ids", "count", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 2, [3, 4]),
        ([1, 2, 3, 4, 1, 2], 7, [3, 4, 1, 2, 3, 4, 1]),  # it goes on with itself
        ([1, 2, 9, 1, 2, 8, 1, 2], 1, [8]),  # the latest place counts
        ([5, 1, 2, 9, 1, 2, 8, 5, 1, 2], 1, [9]),  # the longest run counts more
        ([7, 7, 7], 3, [7, 7, 7]),
        ([1, 2, 3, 2], 3, []),  # one token is no run
        ([1, 2], 3, []),
        ([], 3, []),
    ],
)
def test_it_proposes_what_followed(ids, count, expected):
    assert lookup(ids).propose([], count) == expected


def test_behind_a_drafts_block_a_longer_run_is_needed():
    ngram = lookup([1, 2, 3, 4, 9, 1])
    assert ngram.propose([2], 2) == []
    assert ngram.propose([2, 3], 2) == [4, 9]


small = st.lists(st.integers(0, 3), max_size=30)


@given(st.lists(small, max_size=4), st.lists(st.integers(0, 3), max_size=5), st.integers(0, 9))
def test_pieces_taken_in_equal_a_search_of_the_whole(pieces, guessed, count):
    ngram = NgramLookup()
    for piece in pieces:
        ngram.extend(piece)
    ids = [token for piece in pieces for token in piece]
    assert ngram.propose(guessed, count) == slow(ids, guessed, count, 3 if guessed else 2)
