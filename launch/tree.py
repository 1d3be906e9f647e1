"""DDTree: which of a draft's alternatives stand beside its chain in one verify. Pure.

A child is (slot, rank): what the draft has at a slot, in the order of its own likelihood. A block's
slots are guessed independently, so that any path through ranks is a continuation, and its weight is
the product of its children's rates. The chain comes first, so that a tree is never worse than its
chain; then the best child is taken again and again, until `nodes` are there (Ringel and Shavit,
"DDTree", 2026: best first by the draft's probabilities; ours are by what the target chose).
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

PRIOR: Final = 1.0  # of a rank: so often was it chosen and stated before anything is known
HORIZON: Final = 256.0  # rounds, after which an outcome counts for less than 40 %
LEAST: Final = 1e-4  # no rate is below: every weight is finite


@dataclass(frozen=True, slots=True)
class Slot:
    """What may stand at one place behind the pending token; the first id is the chain's."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # the draft's, one per id


Weigh = Callable[[int, int, float], float]  # (slot, rank, the draft's log-probability) -> log rate


class Ranks:
    """How often the target chose a rank at a slot, given that the path was right so far.

    Kept as what was chosen against what the draft had stated, both decayed: the rate of a child is
    the draft's probability of the moment, as far as such statements have proven right. So it starts
    as the draft's own, tells a slot that the draft is sure of from one where it is not, and at a
    temperature it is the rate of the target's samples.
    """

    def __init__(self) -> None:
        self._chosen: dict[tuple[int, int], float] = {}
        self._stated: dict[tuple[int, int], float] = {}

    def weigh(self, slot: int, rank: int, logprob: float) -> float:
        """The log of the rate."""
        chosen, stated = (
            counts.get((slot, rank), 0.0) + PRIOR for counts in (self._chosen, self._stated)
        )
        return math.log(min(max(math.exp(logprob) * chosen / stated, LEAST), 1.0))

    def note(self, slots: Sequence[Slot], tokens: Sequence[int]) -> None:
        """The target chose `tokens`, one at each slot from the first on."""
        keep = 1 - 1 / HORIZON
        for slot, (what, token) in enumerate(zip(slots, tokens, strict=False)):
            if len(what.ids) == 1:
                continue  # a guess, of which the draft has stated nothing
            for rank, (one, logprob) in enumerate(zip(what.ids, what.logprobs, strict=True)):
                key = (slot, rank)
                self._chosen[key] = self._chosen.get(key, 0.0) * keep + (one == token)
                self._stated[key] = self._stated.get(key, 0.0) * keep + math.exp(logprob)


@dataclass(slots=True)
class Tree:
    """Rows behind the pending token, which is row 0: ids, parents, and their expected worth."""

    ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)  # that the target comes through this row


def grow(slots: Sequence[Slot], chain: int, nodes: int, weigh: Weigh) -> Tree:
    """The chain of the first `chain` slots, then the best of all other children.

    At most `nodes` in all, and no deeper than `slots`; the chances of those behind the chain never
    rise, so that any prefix of the tree is the best one of its size.
    """
    tree = Tree()
    ranked = [_ranked(depth, slot, weigh) for depth, slot in enumerate(slots)]
    heap: list[tuple[float, int, int, int, int]] = []
    count = 0

    def offer(parent: int, depth: int, place: int, weight: float) -> None:
        """Child number `place` of row `parent`, at slot `depth`."""
        nonlocal count
        if depth < len(ranked) and place < len(ranked[depth]):
            count += 1
            score = weight + ranked[depth][place][0]
            heapq.heappush(heap, (-score, count, parent, depth, place))

    weight = 0.0
    for depth in range(min(chain, len(slots), nodes)):
        offer(depth, depth, 1, weight)
        weight += ranked[depth][0][0]
        _add(tree, slots[depth].ids[0], depth, weight)
    offer(len(tree.ids), len(tree.ids), 0, weight)
    while heap and len(tree.ids) < nodes:
        score, _, parent, depth, place = heapq.heappop(heap)
        own, rank = ranked[depth][place]
        _add(tree, slots[depth].ids[rank], parent, -score)
        offer(parent, depth, place + 1, -score - own)
        offer(len(tree.ids), depth + 1, 0, -score)
    return tree


def _ranked(depth: int, slot: Slot, weigh: Weigh) -> list[tuple[float, int]]:
    """(weight, rank) of a slot's ids: the chain's, then the others, best first."""
    weights = [(weigh(depth, rank, logprob), rank) for rank, logprob in enumerate(slot.logprobs)]
    return [weights[0], *sorted(weights[1:], key=lambda one: (-one[0], one[1]))]


def _add(tree: Tree, token: int, parent: int, weight: float) -> None:
    tree.ids.append(token)
    tree.parents.append(parent)
    tree.chances.append(math.exp(weight))
