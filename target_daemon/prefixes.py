"""Kept prefixes apart from any slot: copies of a target's state, budgeted by bytes, least used out.

A prefix is found by its token ids. One that another continues is the other's beginning already,
and is kept no second time where the target's state can be cut.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from target_daemon.target import StateCopy

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The first ``len(tokens)`` positions of a text, with the state that they left."""

    tokens: Tensor  # [n] int64
    state: StateCopy
    rows: Tensor  # [n - oldest, row width]: feature rows of the last positions
    number: int  # the sequence that left it; -1: of an earlier process
    bytes: int = field(init=False)

    def __post_init__(self) -> None:
        plain = sum(each.numel() * each.element_size() for each in (self.tokens, self.rows))
        object.__setattr__(self, "bytes", plain + self.state.bytes)

    @property
    def committed(self) -> int:
        return self.tokens.shape[0]

    @property
    def oldest(self) -> int:
        """The lowest position whose feature row is here."""
        return self.committed - self.rows.shape[0]


def common_length(tokens: Tensor, wanted: Tensor) -> int:
    """How many ids of both [n] are the same from the beginning on."""
    count = min(tokens.shape[0], wanted.shape[0])
    differing = (tokens[:count] != wanted[:count]).nonzero()
    return int(differing[0]) if differing.shape[0] else count


class PrefixStore:
    """At most `budget` bytes of prefixes; `cuttable` says that a prefix has all shorter ones."""

    def __init__(self, budget: int, *, cuttable: bool) -> None:
        self._budget = budget
        self._cuttable = cuttable
        self._held: list[Prefix] = []  # least recently used first

    def __iter__(self) -> Iterator[Prefix]:
        return iter(self._held)

    @property
    def bytes(self) -> int:
        """What all prefixes take together."""
        return sum(each.bytes for each in self._held)

    def makes_room(self, size: int) -> bool:
        """Drop the least used ones until `size` more bytes fit; False where they never will."""
        if size > self._budget:
            return False
        while self.bytes + size > self._budget:
            self._held.pop(0)
        return True

    def knows(self, tokens: Tensor) -> bool:
        """Whether these tokens' state is here already; it then counts as used."""
        for held in self._held:
            same = common_length(held.tokens, tokens) == tokens.shape[0]
            if same and (self._cuttable or held.committed == tokens.shape[0]):
                self.use(held)
                return True
        return False

    def put(self, prefix: Prefix) -> None:
        """Keep it, if it fits at all, in the place of those that it contains."""
        if self._cuttable:
            self._held = [
                held
                for held in self._held
                if common_length(held.tokens, prefix.tokens) < held.committed
            ]
        if self.makes_room(prefix.bytes):
            self._held.append(prefix)

    def use(self, prefix: Prefix) -> None:
        """It was gone on from: it is the last one to be dropped."""
        self._held.remove(prefix)
        self._held.append(prefix)
