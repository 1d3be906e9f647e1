"""What a round verifies: the chain alone, or a tree around it. Pure.

The policy of `launch.policy` chooses the chain. A shape may put other children of its rows behind
it, and says what it needs of the draft for that. Another way to shape a block is one more class.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from launch.block import Block
from launch.costs import Costs
from launch.events import DraftFacts, TargetFacts
from launch.lookups import Rates, unknown
from launch.policy import WidthPolicy
from launch.token_ids import pack_ids, unpack_ids
from launch.tree import Ranks, Slot, grow
from protocol.messages import TreeVerify

Shaped = tuple[Literal["chain", "tree"], str]

ALTERNATIVES: Final = 8  # ids that are asked for at each slot
LATEST: Final = 1 / 8  # what a round counts for in the gain of trees
TOO_SMALL: Final = "a tree of {} nodes has no room beside a chain of {}"
NO_ROOM: Final = "no round had a draft's chain and room for a branch beside it"
UNPAID: Final = "no branch paid for its row"
IDLE: Final = 16  # rounds in which no branch paid, after which alternatives are asked for rarely


@dataclass(frozen=True, slots=True)
class Room:
    """What the block of a round may be."""

    position: int
    depth: int  # of the deepest row: no text goes on behind it
    rows: int  # of one forward


class Shape(Protocol):
    """Completes blocks, and learns from what came of them."""

    def top_k(self, target: TargetFacts, draft: DraftFacts | None) -> int:
        """How many ids of each slot are wanted in this round; 0: the best alone."""
        ...

    def rows(self, chain: int) -> int:
        """At most so many rows has a forward whose chain has `chain`."""
        ...

    def complete(self, block: Block, room: Room) -> None:
        """Put rows behind the chain in `block.proposed`, and their parents into `block`."""
        ...

    def note(self, tokens: Sequence[int]) -> None:
        """The round that was completed last emitted these."""
        ...

    def shape(self) -> Shaped:
        """What has been verified so far, and why not a tree, or not any more."""
        ...


@dataclass(frozen=True, slots=True)
class Manner:
    """How a request's blocks come about."""

    policy: WidthPolicy  # how wide the chain is
    shape: Shape
    lookups: Rates = field(default_factory=unknown)  # how far n-grams are right


class Chain:
    """Nothing beside the chain."""

    def top_k(self, target: TargetFacts, draft: DraftFacts | None) -> int:
        del target, draft
        return 0

    def rows(self, chain: int) -> int:
        return chain

    def complete(self, block: Block, room: Room) -> None:
        pass

    def note(self, tokens: Sequence[int]) -> None:
        pass

    def shape(self) -> Shaped:
        return "chain", ""


@dataclass(slots=True)
class Gain:
    """How many times more tokens a second than its chain alone a round is expected to emit.

    By measured rates and costs. The width policy counts on it, so that a draft is used where its
    chains do not pay and trees do.
    """

    value: float = 1.0
    count: int = 0

    def note(self, ratio: float) -> None:
        """A round's best tree against its chain; 1 where no branch pays for its row."""
        self.count += 1
        self.value += (ratio - self.value) * max(1 / self.count, LATEST)


class Trees:
    """The chain, and of its alternatives the likeliest, `nodes` in all.

    With `costs`, only as many as make a round emit more tokens a second; `gain` learns how many.
    """

    def __init__(
        self, ranks: Ranks, nodes: int, costs: Costs | None = None, gain: Gain | None = None
    ) -> None:
        self._gain = gain or Gain()
        self._ranks = ranks
        self._nodes = nodes
        self._costs = costs
        self._slots: list[Slot] = []  # of the round in progress
        self._idle = 0
        self._why_not = ""
        self._crowd = 0  # of a chain that took all nodes
        self._made = False
        self._offered = False  # whether a chain ever came with alternatives

    def top_k(self, target: TargetFacts, draft: DraftFacts | None) -> int:
        self._why_not = "" if draft is None else no_tree(target, draft)
        self._idle += 1
        if draft is None or self._why_not or (self._idle > IDLE and self._idle % IDLE):
            return 0
        return min(draft.top_k, ALTERNATIVES)

    def rows(self, chain: int) -> int:
        return chain if self._why_not else max(chain, self._nodes + 1)

    def complete(self, block: Block, room: Room) -> None:
        chain = unpack_ids(block.proposed)
        if not chain or not block.top_ids:
            return
        self._slots, self._offered = slots_of(block), True
        nodes = max(len(chain), min(self._nodes, room.rows - 1))
        self._crowd = len(chain) if self._nodes <= len(chain) else 0
        tree = grow(self._slots[: room.depth], len(chain), nodes, self._ranks.weigh)
        rows = len(tree.ids)
        if self._costs is not None:
            rows = self._best(self._costs, len(chain), tree.chances, room.position)
        if rows > len(chain):
            self._idle, self._made = 0, True
            block.proposed = pack_ids(tree.ids[:rows])
            block.parents = pack_ids(tree.parents[:rows])

    def note(self, tokens: Sequence[int]) -> None:
        self._ranks.note(self._slots, tokens)
        self._slots = []

    def shape(self) -> Shaped:
        if self._made:
            return "tree", self._why_not
        return "chain", self._why_not or self._unmade()

    def _unmade(self) -> str:
        """Why no branch was proposed."""
        if self._crowd:
            return TOO_SMALL.format(self._nodes, self._crowd)
        return UNPAID if self._offered and self._costs is not None else NO_ROOM

    def _best(self, costs: Costs, chain: int, chances: Sequence[float], position: int) -> int:
        """How many rows emit the most tokens a second; `chain` where nothing more does."""
        tokens = [1.0]
        for chance in chances:
            tokens.append(tokens[-1] + chance)
        prices = costs.trees(chain + 1, tokens, position)
        if not prices:
            return len(chances)
        rates = [one / price for one, price in zip(tokens[chain:], prices, strict=True)]
        self._gain.note(max(rates) / rates[0])
        return chain + rates.index(max(rates))


def slots_of(block: Block) -> list[Slot]:
    """What may stand at each place: the chain's token, and the draft's others where it is its own.

    Behind the chain, what else the draft offered.
    """
    offered, chain = unpack_ids(block.offered), unpack_ids(block.proposed)
    top, few = unpack_ids(block.top_ids), len(block.top_logprobs) // max(1, len(offered))
    slots = [
        Slot(top[at * few : (at + 1) * few], block.top_logprobs[at * few : (at + 1) * few])
        for at in range(len(offered) if few else 0)
    ]
    for at, token in enumerate(chain):
        if at >= len(slots):
            slots.append(Slot((token,), (0.0,)))
        elif token != offered[at]:
            slots[at] = Slot((token,), (0.0,))
    return slots


def no_tree(target: TargetFacts, draft: DraftFacts) -> str:
    """Why this pair verifies chains, in words for `verify_reason`; empty where it can do trees."""
    if not target.tree_verify:
        return target.tree_detail or "this target verifies chains only"
    return "" if draft.top_k else "this draft has one token for each slot"


def shape_for(
    verify: TreeVerify, nodes: int, ranks: Ranks, costs: Costs, gain: Gain | None = None
) -> Shape:
    """The shape that a request asks for; see `protocol.messages.Submit`."""
    makers: dict[str, Callable[[], Shape]] = {
        "chain": Chain,
        "tree": lambda: Trees(ranks, nodes),
        "auto": lambda: Trees(ranks, nodes, costs, gain),
    }
    return makers[verify]()
