"""The sequences that a draft is trained on and held against, read from shards as they are needed.

Of every shard what is always in memory is a few numbers a sequence; tokens and likeliest tokens
stay for the shards that were used last, and features are mapped, never read as a whole.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from protocol.checkpoints.shards import Shard, map_features, read_shard, shard_numbers
from protocol.closing import Closing
from protocol.errors import CheckpointError, ConfigError
from protocol.training import CACHED_SHARDS, FEATURES, LEAST_ANSWER

Array = npt.NDArray[Any]
# Makes the features of a shard whose file is missing; see `draft_daemon.training.features`.
Make = Callable[[int, Shard], Array]


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """One sequence: prompt and answer."""

    tokens: Array  # [n] int32
    prompt: int  # tokens
    top_ids: Array  # [n, k] int32: likeliest next tokens behind each position
    top_logprobs: Array  # [n, k] float16; a row of zeros says nothing
    mapped: Callable[[], Array]  # what `features` are taken from
    task: str

    @property
    def features(self) -> Array:
        """Rows [n, taps * hidden], bits of bfloat16; they may have to be made for it."""
        return self.mapped()


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sequence lies."""

    shard: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What the data are, so that a resumed run finds them unchanged."""

    shards: tuple[int, ...]
    sequences: int  # to train on
    tokens: int  # of them
    held_out: int  # greedy sequences that are walked


class Corpus(Closing):
    """All shards of a folder; closing drops what is mapped of them."""

    def __init__(
        self,
        folder: Path,
        taps: Sequence[int],
        vocab: int,
        make: Make | None,
        *,
        width: int | None = None,
    ) -> None:
        """Reads every shard once. Raises CheckpointError, and ConfigError for too little data.

        `width`: of a row of features; other ones are refused.
        """
        self._width = width
        self._folder, self._taps, self._vocab, self._make = folder, tuple(taps), vocab, make
        self._shards: OrderedDict[int, Shard] = OrderedDict()
        self._features: OrderedDict[int, Array] = OrderedDict()
        self.trained: dict[int, Array] = {}  # shard -> [t] its sequences to train on
        self.walked: list[Place] = []
        self.counts = np.zeros(vocab, np.int64)  # of tokens in answers that are trained on
        self.longest = 0  # tokens of a sequence
        tokens = 0
        for number in shard_numbers(folder):
            tokens += self._survey(number, self.shard(number))
        self.facts = Facts(
            tuple(self.trained),
            sum(len(part) for part in self.trained.values()),
            tokens,
            len(self.walked),
        )
        if not self.facts.sequences or not self.walked:
            raise ConfigError(
                f"{folder}: {self.facts.sequences} sequences to train on and {len(self.walked)} "
                "greedy ones held out; at least one of both is needed"
            )

    def close(self) -> None:
        self._shards.clear()
        self._features.clear()

    def shard(self, number: int) -> Shard:
        """One shard, from memory where it was used lately."""
        found = self._shards.pop(number, None)
        if found is None:
            found = read_shard(self._folder, number, self._vocab)
        self._shards[number] = found
        while len(self._shards) > CACHED_SHARDS:
            self._shards.popitem(last=False)
        return found

    def text(self, place: Place) -> Text:
        """One sequence; its features are looked for when they are asked for.

        They raise ConfigError where they are missing and cannot be made.
        """
        shard = self.shard(place.shard)
        rows = shard.rows(place.sequence)
        return Text(
            shard.tokens[rows],
            int(shard.prompts[place.sequence]),
            shard.top_ids[rows],
            shard.top_logprobs[rows],
            lambda: self._of(place.shard, shard)[rows],
            shard.task(place.sequence),
        )

    def _of(self, number: int, shard: Shard) -> Array:
        found = self._features.pop(number, None)
        if found is None:
            found = map_features(self._folder, number, shard, self._taps)
        if found is None:
            if self._make is None:
                raise ConfigError(
                    f"shard {number} has no features, and no config says how to make them"
                )
            found = self._make(number, shard)
        if self._width not in (None, found.shape[1]):
            raise CheckpointError(
                f"{self._folder / FEATURES.format(number)}: rows are {found.shape[1]} wide, and "
                f"the target's {self._width}"
            )
        self._features[number] = found
        while len(self._features) > CACHED_SHARDS:
            self._features.popitem(last=False)
        return found

    def _survey(self, number: int, shard: Shard) -> int:
        """Take note of one shard; returns the tokens of its sequences to train on."""
        lengths = np.diff(shard.starts)
        self.longest = max(self.longest, int(lengths.max()))
        usable = lengths - shard.prompts >= LEAST_ANSWER
        held_out = shard.held_out.astype(bool)
        self.trained[number] = np.flatnonzero(usable & ~held_out)
        greedy = np.flatnonzero(usable & held_out & (shard.temperatures == 0.0))
        self.walked += [Place(number, int(sequence)) for sequence in greedy]
        for sequence in self.trained[number]:
            rows = shard.rows(sequence)
            answer = shard.tokens[rows.start + int(shard.prompts[sequence]) : rows.stop]
            self.counts += np.bincount(answer, minlength=self._vocab)
        return int(lengths[self.trained[number]].sum())
