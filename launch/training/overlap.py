"""Prompts that are too near to others which must stay unseen, by runs of tokens that both have."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

RUN: Final = 8  # tokens

Words = Callable[[str], Sequence[int]]


class Overlap:
    """Holds the runs of `RUN` tokens of all `texts`, and the shorter ones of these as wholes.

    A text is spelled in lower case with single spaces before it is cut into the target's tokens.
    """

    def __init__(self, texts: Iterable[str], words: Words) -> None:
        self._words = words
        self._runs: set[tuple[int, ...]] = set()
        for text in texts:
            self._runs.update(self._of(text))

    def has(self, text: str) -> bool:
        """Whether `text` shares a run with one of those texts."""
        return bool(self._runs) and any(run in self._runs for run in self._of(text))

    def _of(self, text: str) -> Iterable[tuple[int, ...]]:
        ids = tuple(self._words(" ".join(text.lower().split())))
        if len(ids) <= RUN:
            return [ids] if ids else []
        return (ids[at : at + RUN] for at in range(len(ids) - RUN + 1))
