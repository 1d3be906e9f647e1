"""Hint tokens: a caller's guess at some positions, verified like any proposal."""

from collections.abc import Mapping

from launch.token_ids import pack_ids, unpack_ids


def overlay(
    proposed: bytes, hints: Mapping[int, int], first: int, widest: int
) -> tuple[bytes, frozenset[int]]:
    """Put hints over proposals, and behind them as far as they reach without a hole.

    Proposal ``i`` would be generated token ``first + i``, which is the key of `hints`. At most
    `widest` proposals come back, with the indices of those that are hints.
    """
    ids = list(unpack_ids(proposed)[:widest])
    hinted = {index for index in range(len(ids)) if first + index in hints}
    for index in hinted:
        ids[index] = hints[first + index]
    while len(ids) < widest and first + len(ids) in hints:
        hinted.add(len(ids))
        ids.append(hints[first + len(ids)])
    return pack_ids(ids), frozenset(hinted)
