"""Where texts stand: long ones with long ones, since a group of slots is read to its longest.

Every text grows by one token a step, so that an order once made stays; it is mended where a text
comes or goes, with one move for each group behind. Pure.
"""

from collections.abc import Sequence

from target_daemon.dense.abreast import GROUP

Move = tuple[int, int]  # from a slot into one whose text is gone


def enter(lengths: Sequence[int], length: int) -> tuple[int, list[Move]]:
    """The slot for a text of `length` tokens among those of `lengths`, and what moves before."""
    free, moves = len(lengths), list[Move]()
    for group in range(free // GROUP - 1, -1, -1):
        slots = range(group * GROUP, (group + 1) * GROUP)
        shortest = min(slots, key=lengths.__getitem__)
        if lengths[shortest] >= length:
            break
        moves.append((shortest, free))
        free = shortest
    return free, moves


def leave(lengths: Sequence[int], slot: int) -> list[Move]:
    """What moves, in order, once the text of `slot` is gone, so that the last slot is free."""
    free, last, moves = slot, len(lengths) - 1, list[Move]()
    for group in range(slot // GROUP + 1, last // GROUP + 1):
        slots = range(group * GROUP, min((group + 1) * GROUP, last + 1))
        longest = max(slots, key=lengths.__getitem__)
        moves.append((longest, free))
        free = longest
    if free != last:
        moves.append((last, free))
    return moves
