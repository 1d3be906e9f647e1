"""The next tokens of many texts, each by the one choice function."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from protocol.choice import choose, is_plain, penalises
from protocol.closing import Closing
from protocol.errors import DaemonError
from protocol.messages import Sampling

NOTHING: Final = torch.empty(0, dtype=torch.int64)
GREEDY: Final = Sampling()
FEW: Final = 4  # rows that other threads are not asked for


@dataclass(frozen=True, slots=True)
class Chosen:
    """What is needed to choose for one row."""

    sampling: Sampling
    tokens: Sequence[int]  # of its text so far


class Chooser(Closing):
    """Greedy rows are chosen at once; the others by `threads` threads, as NumPy uses one each."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def choose(self, logits: Tensor, rows: Sequence[Chosen]) -> list[int | DaemonError]:
        """The next token of each of the texts, or why none follows; `logits` [n, vocab]."""
        chosen: list[int | DaemonError] = [0] * len(rows)
        greedy = [at for at, row in enumerate(rows) if is_plain(row.sampling)]
        alone = [at for at, row in enumerate(rows) if not is_plain(row.sampling)]
        if greedy:
            try:
                ids = choose(logits[greedy] if alone else logits, 0, GREEDY, NOTHING).tolist()
            except DaemonError:  # of one row; which, is found out one by one
                alone += greedy
            else:
                for at, token in zip(greedy, ids, strict=True):
                    chosen[at] = token

        def one(at: int) -> int | DaemonError:
            return _choose(logits[at : at + 1], rows[at])

        for at, token in zip(alone, self._each(one, alone), strict=True):
            chosen[at] = token
        return chosen

    def _each(
        self, one: Callable[[int], int | DaemonError], rows: Sequence[int]
    ) -> Iterable[int | DaemonError]:
        if self._threads == 1 or len(rows) < FEW:
            return map(one, rows)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="choosing")
        return self._pool.map(one, rows)


def _choose(logits: Tensor, row: Chosen) -> int | DaemonError:
    """The choice at one row [1, vocab]."""
    sampling, position = row.sampling, len(row.tokens)
    history = torch.tensor(row.tokens) if penalises(sampling) else NOTHING
    try:
        return int(choose(logits, position, sampling, history)[0])
    except DaemonError as error:
        return error
