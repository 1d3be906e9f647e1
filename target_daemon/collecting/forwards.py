"""How the next rows of several texts are run: all in one forward, or text by text.

Both are given the same steps and leave the same in the `Records`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from target_daemon.collecting.records import Records
from target_daemon.dense.abreast import Abreast, Chunk
from target_daemon.dense.model import DenseTarget
from target_daemon.families.base import NativeTarget


@dataclass(frozen=True, slots=True)
class Step:
    """The next rows of the text in one slot: at least one, from position `first` on."""

    first: int
    tokens: Sequence[int]

    @property
    def last(self) -> int:
        """The position of the last row."""
        return self.first + len(self.tokens) - 1


class Forwards(ABC):
    """Texts stand in the slots ``0 .. n - 1``."""

    @abstractmethod
    def start(self, slot: int) -> None:
        """A text begins in `slot`."""

    @abstractmethod
    def run(self, steps: Sequence[Step], records: Records) -> Tensor:
        """Run the step of each slot, in order; what `score` needs of each one's last row [n, ?]."""

    @abstractmethod
    def score(self, rows: Tensor) -> Tensor:
        """Logits [n, vocab], float32, of some of the rows that `run` returned."""

    @abstractmethod
    def forget(self, slot: int, rows: int) -> None:
        """Leave nothing of a text, `rows` long so far, whose numbers are not finite."""

    @abstractmethod
    def move(self, source: int, goal: int, rows: int) -> None:
        """The text of `source`, `rows` long so far, goes on in `goal`, whose text has ended."""


class Together(Forwards):
    """One forward for all, where the target can."""

    def __init__(self, target: DenseTarget) -> None:
        self._target = target

    def start(self, slot: int) -> None:
        self._target.reset(slot)

    def run(self, steps: Sequence[Step], records: Records) -> Tensor:
        chunks = [
            Chunk(slot, step.first, len(step.tokens) - 1)
            for slot, step in enumerate(steps)
            if len(step.tokens) > 1
        ]
        places = Abreast([step.last for step in steps], chunks)
        tokens = [step.tokens[-1] for step in steps]
        for chunk in chunks:
            tokens += steps[chunk.slot].tokens[:-1]
        records.begin(places.slots, places.positions)
        return self._target.run_abreast(torch.tensor(tokens), places, records)[: len(steps)]

    def score(self, rows: Tensor) -> Tensor:
        return self._target.score(rows)

    def forget(self, slot: int, rows: int) -> None:
        _clear(self._target, slot, rows)

    def move(self, source: int, goal: int, rows: int) -> None:
        self._target.move(source, goal, rows)


class OneByOne(Forwards):
    """By the contract that every target fulfils; features come out of its ring."""

    def __init__(self, target: NativeTarget) -> None:
        self._target = target
        self._home = list(range(target.slots))  # of each slot's text in the target

    def start(self, slot: int) -> None:
        self._target.reset(self._home[slot])

    def run(self, steps: Sequence[Step], records: Records) -> Tensor:
        return torch.cat([self._run(slot, step, records) for slot, step in enumerate(steps)])

    def _run(self, slot: int, step: Step, records: Records) -> Tensor:
        target, home = self._target, self._home[slot]
        tokens, logits = torch.tensor(step.tokens), None
        for at in range(0, len(tokens), target.prefill_chunk):
            part, first = tokens[at : at + target.prefill_chunk], step.first + at
            is_last = at + len(part) == len(tokens)
            logits = target.verify_batch(home, part, first, "last" if is_last else "none")
            if records.columns:
                capacity = target.ring.shape.capacity
                rows = torch.arange(first, first + len(part)) % capacity
                ring = target.ring.rows[home]
                records.take_rows(slot, first, ring[rows.to(ring.device)])
        if logits is None:
            raise RuntimeError("the target gave no logits for the last row")
        return logits

    def score(self, rows: Tensor) -> Tensor:
        return rows

    def forget(self, slot: int, rows: int) -> None:
        _clear(self._target, self._home[slot], rows)

    def move(self, source: int, goal: int, rows: int) -> None:
        del rows
        homes = self._home
        homes[source], homes[goal] = homes[goal], homes[source]


def _clear(target: NativeTarget, slot: int, rows: int) -> None:
    """Return to an empty state, as after a forward of `rows` that failed: no mask silences NaN."""
    target.reset(slot)
    target.restore_kv(slot, target.snapshot_kv(slot, 0, rows))
