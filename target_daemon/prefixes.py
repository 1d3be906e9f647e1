"""Kept prefixes apart from any slot: copies of a target's state, budgeted by bytes, least used out.

A prefix is found by its token ids. One that another continues is the other's beginning already,
and is kept no second time where the target's state can be cut.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from torch import Tensor

from target_daemon.target import StateCopy

NOBODY: Final = -1


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The first ``len(tokens)`` positions of a text, with the state that they left."""

    tokens: Tensor  # [n] int64
    state: StateCopy
    rows: Tensor  # [n - oldest, row width]: feature rows of the last positions
    number: int  # the sequence that left it; NOBODY: of an earlier process
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


class Shelf(Protocol):
    """Where prefixes lie that memory has no room for: `target_daemon.prefix_folder`."""

    @property
    def entries(self) -> Sequence["Entry"]:
        """What is there."""
        ...

    def load(self, stored: Any) -> Prefix | None:
        """All of one of them, or None where it cannot be used."""
        ...

    def save(self, prefix: Prefix, *, cuttable: bool) -> None:
        """Keep it as well."""
        ...


class Entry(Protocol):
    """A prefix, in memory or elsewhere."""

    @property
    def tokens(self) -> Tensor: ...

    @property
    def committed(self) -> int: ...

    @property
    def oldest(self) -> int: ...

    @property
    def number(self) -> int: ...


class PrefixStore:
    """At most `budget` bytes of prefixes; `cuttable` says that a prefix has all shorter ones.

    With a `shelf` what is dropped goes there.
    """

    def __init__(self, budget: int, *, cuttable: bool, shelf: Shelf | None = None) -> None:
        self._budget = budget
        self._cuttable = cuttable
        self._shelf = shelf
        self._held: list[Prefix] = []  # least recently used first

    def __iter__(self) -> Iterator[Entry]:
        yield from self._held
        if self._shelf is not None:
            yield from self._shelf.entries

    @property
    def bytes(self) -> int:
        """What all prefixes in memory take together."""
        return sum(each.bytes for each in self._held)

    @property
    def has_shelf(self) -> bool:
        """Whether what memory has no room for is kept as well."""
        return self._shelf is not None

    def lasts(self, size: int) -> bool:
        """Whether it would stay in memory; room is made for it then, by dropping others."""
        if size > self._budget:
            return False
        while self.bytes + size > self._budget:
            self._drop(self._held[0])
        return True

    def knows(self, tokens: Tensor) -> bool:
        """Whether these tokens' state is in memory already; it then counts as used."""
        for held in self._held:
            same = common_length(held.tokens, tokens) == tokens.shape[0]
            if same and (self._cuttable or held.committed == tokens.shape[0]):
                self._use(held)
                return True
        return False

    def put(self, prefix: Prefix) -> None:
        """Keep it, in the place of those that it contains; where it cannot stay, on the shelf."""
        if self._cuttable:
            self._held = [
                held
                for held in self._held
                if common_length(held.tokens, prefix.tokens) < held.committed
            ]
        if self.lasts(prefix.bytes):
            self._held.append(prefix)
        elif self._shelf is not None:
            self._shelf.save(prefix, cuttable=self._cuttable)

    def get(self, entry: Entry) -> Prefix | None:
        """All of an entry, which is the last one to be dropped now; None where it is damaged."""
        if isinstance(entry, Prefix):
            self._use(entry)
            return entry
        prefix = None if self._shelf is None else self._shelf.load(entry)
        if prefix is not None and self.lasts(prefix.bytes):
            self._held.append(prefix)
        return prefix

    def save(self, prefix: Prefix) -> None:
        """Put it on the shelf, if there is one, as the process ends."""
        if self._shelf is not None:
            self._shelf.save(prefix, cuttable=self._cuttable)

    @property
    def held(self) -> Sequence[Prefix]:
        """Those in memory, the most recently used first."""
        return self._held[::-1]

    def forget_numbers(self) -> None:
        """No sequence that follows is one of those that left these."""
        self._held = [replace(held, number=NOBODY) for held in self._held]

    def _use(self, prefix: Prefix) -> None:
        self._held.remove(prefix)
        self._held.append(prefix)

    def _drop(self, prefix: Prefix) -> None:
        self._held.remove(prefix)
        if self._shelf is not None:
            self._shelf.save(prefix, cuttable=self._cuttable)
