"""Which sequences, anchors and rows of the head a step sees: a function of the seed and the step.

Nothing is drawn from a state that goes on, so that a run that was resumed sees what it would have
seen, and every rank knows the whole step and takes its share.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from draft_daemon.training.data import Corpus, Place, Text
from protocol.training import TrainConfig

Array = npt.NDArray[Any]
WINDOW: Final = 8  # shards whose sequences are shuffled among each other
LIKELY: Final = float(np.log(0.01))  # ids that the target gives more than this are always scored
LEAST_WEIGHT: Final = 0.2  # slots that count less are trained in the last steps alone
ORDER, ANCHORS, ROWS = range(3)  # what is drawn, apart from each other


@dataclass(frozen=True, slots=True, eq=False)
class Pick:
    """One sequence of a step, and where its blocks begin."""

    text: Text
    anchors: Array  # [a] int64, ascending: positions in the answer with at least one behind


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """All that a step sees, on all ranks together."""

    picks: tuple[Pick, ...]
    rows: Array | None  # [c] int64: rows of the head; None: all
    offset: Array | None  # [c] float32: what is added to their logits
    width: int  # rows of a block
    total: float  # weight of all predicted tokens


class Order:
    """The endless sequence of passes over the data."""

    def __init__(self, corpus: Corpus, config: TrainConfig) -> None:
        self._corpus, self._config = corpus, config
        self._count = corpus.facts.sequences
        self._pass, self._places = -1, np.empty((0, 2), np.int64)
        by_use = np.argsort(-corpus.counts, kind="stable")
        self._frequent = np.sort(by_use[: config.frequent_rows]).astype(np.int64)
        self._others = np.sort(by_use[config.frequent_rows :]).astype(np.int64)
        slots = np.arange(config.block_size - 1)
        self.slot_weights = np.exp(-slots / config.gamma)
        self._short = 1 + int(np.count_nonzero(self.slot_weights >= LEAST_WEIGHT))

    def passes(self, steps: int) -> float:
        """How often `steps` steps have gone over the data."""
        return steps * self._config.sequences / self._count

    def step(self, number: int, *, whole: bool) -> Step:
        """Step `number`; `whole`: on all rows of the head, and of blocks."""
        config, size = self._config, self._config.sequences
        width = config.block_size if whole else self._short
        picks = tuple(self._pick(at) for at in range(number * size, (number + 1) * size))
        weights = self.slot_weights[: width - 1].cumsum()
        total = sum(
            float(
                weights[
                    np.minimum(len(pick.text.tokens) - 1 - pick.anchors, len(weights)) - 1
                ].sum()
            )
            for pick in picks
        )
        if whole or not config.frequent_rows or not len(self._others):
            return Step(picks, None, None, width, total)
        return Step(picks, *self._rows(number, picks), width, total)

    def _pick(self, at: int) -> Pick:
        text = self._corpus.text(self._place(at))
        source = np.random.default_rng((self._config.seed, ANCHORS, at))
        places = np.arange(text.prompt, len(text.tokens) - 1)
        count = min(self._config.anchors, len(places))
        return Pick(text, np.sort(source.choice(places, count, replace=False)))

    def _place(self, at: int) -> Place:
        number, index = divmod(at, self._count)
        if number != self._pass:
            self._pass, self._places = number, np.concatenate(list(self._shuffled(number)))
        shard, sequence = self._places[index]
        return Place(int(shard), int(sequence))

    def _shuffled(self, number: int) -> Iterator[Array]:
        source = np.random.default_rng((self._config.seed, ORDER, number))
        shards = source.permutation(np.array(list(self._corpus.trained)))
        for start in range(0, len(shards), WINDOW):
            several = [self._listed(int(shard)) for shard in shards[start : start + WINDOW]]
            yield source.permutation(np.concatenate(several))

    def _listed(self, shard: int) -> Array:
        sequences = self._corpus.trained[shard]
        return np.stack((np.full(len(sequences), shard), sequences), axis=1)

    def _rows(self, number: int, picks: tuple[Pick, ...]) -> tuple[Array, Array]:
        """Frequent rows, those that this step's blocks are about, and some of all others.

        What is drawn stands for everything that is not there: ``log(others / drawn)`` is added to
        its logits, so that the sum over rows is expected to be the whole head's.
        """
        needed = np.unique(np.concatenate([_told(pick) for pick in picks]))
        sure = np.union1d(self._frequent, needed)
        others = np.setdiff1d(self._others, needed, assume_unique=True)
        count = min(self._config.random_rows, len(others))
        source = np.random.default_rng((self._config.seed, ROWS, number))
        drawn = source.choice(others, count, replace=False)
        rows = np.concatenate((sure, drawn))
        offset = np.zeros(len(rows), np.float32)
        if count:
            offset[len(sure) :] = np.log(len(others) / count)
        return rows, offset


def _told(pick: Pick) -> Array:
    """Ids that the answer behind the first anchor has, and that the target found likely there."""
    first, text = int(pick.anchors[0]), pick.text
    likely = text.top_logprobs[first:] > LIKELY
    said = text.top_logprobs[first:, -1:] < 0  # a row of zeros says nothing
    return np.concatenate((text.tokens[first + 1 :], text.top_ids[first:][likely & said]))
