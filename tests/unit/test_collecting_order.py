"""Texts of like length stand together, whatever comes and goes."""

import itertools
import random

from target_daemon.collecting.order import enter, leave
from target_daemon.dense.abreast import GROUP


def _moved(slots, moves):
    """Carry moves out; each goes into a slot that is free at that time."""
    for source, goal in moves:
        assert slots[goal] is None
        slots[goal], slots[source] = slots[source], None


def test_a_text_that_comes_or_goes_leaves_all_together_and_the_long_ones_first():
    source, slots = random.Random(5), []
    for _ in range(2000):
        if slots and (len(slots) == 70 or source.random() < 0.45):
            gone = source.randrange(len(slots))
            moves = leave(slots, gone)
            slots[gone] = None
            _moved(slots, moves)
            assert slots.pop() is None
        else:
            new = source.randrange(1, 500)
            slot, moves = enter(slots, new)
            slots.append(None)
            _moved(slots, moves)
            assert slots[slot] is None
            slots[slot] = new
        assert None not in slots
        groups = [slots[at : at + GROUP] for at in range(0, len(slots), GROUP)]
        assert all(min(longer) >= max(shorter) for longer, shorter in itertools.pairwise(groups))


def test_no_more_moves_than_there_are_groups_and_one():
    lengths = list(range(100, 100 - 4 * GROUP, -1))
    assert enter(lengths, 5) == (64, [])
    assert enter(lengths, 200)[1] == [(63, 64), (47, 63), (31, 47), (15, 31)]
    assert leave(lengths, 3) == [(16, 3), (32, 16), (48, 32), (63, 48)]
    assert leave(lengths, 63) == []
