"""Proposals without a network: what followed the last tokens when they came before. Pure.

"Prompt lookup decoding" (Saxena, 2023): good where a text quotes its prompt or itself.
"""

from collections.abc import Sequence
from typing import Final

from launch.journal import Journal
from launch.token_ids import WIDTH, unpack_ids

REACH: Final = 32_768  # tokens of a prompt, its last ones, in which runs are looked for
LONGEST: Final = 5
SHORTEST: Final = 2  # alone; a match of one token is rarely more than chance
TRUSTED: Final = 3  # behind a draft's block, whose own tokens are only guesses


class NgramLookup:
    """Remembers where each run of up to 5 tokens came last, and what followed it."""

    __slots__ = ("_follows", "_ids")

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._follows: dict[tuple[int, ...], int] = {}  # run -> index of the token after it

    def extend(self, ids: Sequence[int]) -> None:
        """Take in tokens that are certain: the prompt, then what each round emitted."""
        for token in ids:
            end = len(self._ids)
            for length in range(1, min(LONGEST, end) + 1):
                self._follows[tuple(self._ids[end - length :])] = end
            self._ids.append(token)

    def propose(self, guessed: Sequence[int], count: int) -> list[int]:
        """Up to `count` ids to follow everything taken in and `guessed`.

        None where no run came before that is long enough to be more than chance.
        """
        run, found = self.find(guessed, count)
        return found if run >= (TRUSTED if guessed else SHORTEST) else []

    def find(self, guessed: Sequence[int], count: int) -> tuple[int, list[int]]:
        """How long a run was found, and `count` ids that would follow; 0 and none where none was.

        The longest run that was seen decides. A continuation that reaches the end goes on with
        itself, so that a repetition is proposed for as long as is asked.
        """
        tail = [*self._ids[-LONGEST:], *guessed][-LONGEST:]
        for length in range(len(tail), 0, -1):
            start = self._follows.get(tuple(tail[-length:]))
            if start is not None:
                return length, self._continuation(start, guessed, count)
        return 0, []

    def _continuation(self, start: int, guessed: Sequence[int], count: int) -> list[int]:
        known = self._ids[start : start + count]  # at least the one token that followed
        if len(known) < count:
            known += guessed
        for index in range(count):
            known.append(known[index])
        return known[:count]


class RequestNgrams:
    """The n-grams of one request, which take in its prompt and output as far as these have come."""

    __slots__ = ("_known", "_ngram")

    def __init__(self) -> None:
        self._ngram = NgramLookup()
        self._known = -1  # tokens of the output that were taken in; -1: nor is the prompt

    def of(self, journal: Journal) -> NgramLookup:
        """With all that `journal` has."""
        if self._known < 0:
            self._ngram.extend(unpack_ids(journal.prompt[-REACH * WIDTH :]))
            self._known = 0
        self._ngram.extend(unpack_ids(journal.after(self._known)))
        self._known = journal.emitted
        return self._ngram
