"""Proposals that no draft made: a caller's hints, and n-grams; verified like any other."""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

from launch.block import Block
from launch.journal import Journal
from launch.lookups import Lookups, Rates, agreeing
from launch.ngram import NgramLookup, RequestNgrams
from launch.policy import Situation, WidthPolicy
from launch.token_ids import pack_ids, unpack_ids
from protocol.messages import Ngram

START: Final = 1.0  # tokens a round that a draft is believed to have right at first
SHARE: Final = 0.2  # of the latest round, or token, in a moving mean
TRUST: Final = 0.3  # of the latest tokens with a hint, that hints must have had right

Mode = tuple[Literal["speculative", "autoregressive"], str]


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


class Race:
    """Who has been right for longer: the draft's block with what n-grams add, or n-grams alone.

    Both are held against what each round emits, whoever's block it was. A round that emits few
    tokens says little about a longer proposal, so that the leader is rated too low, not too high.
    """

    def __init__(self) -> None:
        self._rates = {"draft": START, "ngram": 0.0}  # tokens a round, moving means
        self._tried: dict[str, Sequence[int]] = {}

    @property
    def ngram_leads(self) -> bool:
        return self._rates["ngram"] > self._rates["draft"]

    def enter(self, draft: Sequence[int], ngram: Sequence[int]) -> None:
        """What each would have the next tokens be."""
        self._tried = {"draft": draft, "ngram": ngram}

    def judge(self, emitted: Sequence[int]) -> None:
        """The round's tokens are known."""
        for name, ids in self._tried.items():
            if ids:
                same = agreeing(ids, emitted)
                self._rates[name] += (same - self._rates[name]) * SHARE
        self._tried = {}


class Hints:
    """A caller's ids by generation position; left while they are wrong.

    Each token that is emitted where there is a hint says whether it was right, proposed or not, so
    that hints are taken up again as soon as the text is theirs.
    """

    def __init__(self, ids: Mapping[int, int]) -> None:
        self._ids = ids
        self._last = max(ids, default=-1)
        self._right = 1.0  # share of the latest, a moving mean
        self._first = 0  # generation position of the round's first token

    def lie_ahead(self, position: int) -> bool:
        """Whether any is to be used at generation `position` or behind it."""
        return position <= self._last and bool(self.usable)

    @property
    def given(self) -> bool:
        """Whether there are any."""
        return bool(self._ids)

    @property
    def usable(self) -> Mapping[int, int]:
        """Those to propose now: all, or none."""
        return self._ids if self._right >= TRUST else {}

    def begin(self, first: int) -> None:
        """A round emits tokens from generation position `first` on."""
        self._first = first

    def judge(self, emitted: Sequence[int]) -> None:
        """The round has emitted these tokens."""
        for position, token in enumerate(emitted, self._first):
            if position in self._ids:
                self._right += ((self._ids[position] == token) - self._right) * SHARE


class Guesses:
    """Completes each round's block: hints override the draft, n-grams go on behind both.

    Where n-grams have lately been right for longer than the draft, they replace its block. All this
    where `ngram` is "always"; where it is "auto", and no hints to use lie ahead, they replace
    a round that the policy expects less of, which then asks no draft.
    """

    def __init__(self, hints: Mapping[int, int], ngram: Ngram, rates: Rates) -> None:
        self._hints = Hints(hints)
        self._ngrams = RequestNgrams() if ngram == "always" else None
        self._lookups = Lookups(rates) if ngram == "auto" else None
        self._alone: tuple[int, ...] = ()  # the round's, where n-grams make it
        self._race = Race()

    def rows(self, policy: WidthPolicy, now: Situation, journal: Journal, most: int) -> int:
        """Rows of a round that n-grams make by themselves, pending token included; 1: none."""
        self._alone = ()
        if self._lookups is None or not policy.learns or most < 2:
            return 1
        found = self._lookups.find(journal, most - 1)
        is_free = found and not self._hints.lie_ahead(journal.emitted)
        rows = policy.rows_for(self._lookups.expected(), now) if is_free else 1
        self._alone = found[: rows - 1]
        return rows

    @property
    def learns(self) -> bool:
        """Whether the next round depends on what the last one emitted."""
        return self._hints.given

    def cover(self, journal: Journal, count: int) -> bool:
        """Whether hints would override each of the next `count` proposals, one at least."""
        first, hints = journal.emitted, self._hints.usable
        return count > 0 and all(first + index in hints for index in range(count))

    def complete(self, block: Block, journal: Journal, widest: int) -> None:
        """Change `block` to at most `widest` proposals for the tokens after the pending one."""
        if self._alone and not block.offered:
            block.proposed = pack_ids(self._alone)
            block.looked_up = frozenset(range(len(self._alone)))
        self._hints.begin(journal.emitted)
        if hints := self._hints.usable:
            hinted = overlay(block.proposed, hints, journal.emitted, widest)
            block.proposed, block.hinted = hinted
        if self._ngrams is not None:
            self._look_up(self._ngrams.of(journal), block, widest)

    def _look_up(self, ngram: NgramLookup, block: Block, widest: int) -> None:
        ids = unpack_ids(block.proposed)
        found = ngram.propose(ids, widest - len(ids))
        alone = ngram.propose((), widest) if ids and not block.hinted else []
        self._race.enter((*ids, *found), alone)
        if alone and self._race.ngram_leads:
            ids, found = (), alone
        block.proposed = pack_ids((*ids, *found))
        block.looked_up = frozenset(range(len(ids), len(ids) + len(found)))

    def judge(self, emitted: Sequence[int]) -> None:
        """A round has emitted these tokens."""
        self._hints.judge(emitted)
        self._race.judge(emitted)
        if self._lookups is not None:
            self._lookups.judge(emitted)


def with_guesses(mode: Mode, guessed: int, drafted: int) -> Mode:
    """The request's mode: blocks were verified without a draft if guesses made some.

    `guessed` and `drafted` proposals were verified, hints and n-grams the former.
    """
    if mode[0] == "speculative" or not guessed:
        return mode
    more = "guesses more than drafts" if guessed > drafted else "guesses beside drafts"
    return "speculative", f"{more if drafted else 'guesses alone'}: {mode[1]}"
