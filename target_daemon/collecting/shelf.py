"""Gathers kept answers and writes them as shards, the features of the first ones beside them."""

from pathlib import Path

from protocol.checkpoints.shards import (
    Array,
    Example,
    clear_remains,
    count_tokens,
    join,
    shard_numbers,
    write_features,
    write_shard,
)
from protocol.errors import Unavailable
from protocol.training import FEATURES, CollectConfig, Written


class Shelf:
    """The folder of one run. Shards that lie there stay, and numbers go on behind them."""

    def __init__(self, config: CollectConfig) -> None:
        self._folder, self._taps = Path(config.folder), config.taps
        self._most, self._budget = config.shard_tokens, config.feature_bytes
        self._examples: list[Example] = []
        self._features: list[Array] = []
        self._gathered = 0
        self.features = bool(config.taps) and config.feature_bytes > 0
        self._next = self._tokens = 0

    def open(self) -> None:
        """Look at what lies there. CheckpointError for a broken shard, Unavailable for a folder."""
        folder = self._folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            clear_remains(folder)
            numbers = shard_numbers(folder)
            files = [folder / FEATURES.format(number) for number in numbers]
            self._budget -= sum(file.stat().st_size for file in files if file.exists())
        except OSError as error:
            raise Unavailable(f"cannot use {folder}: {error.strerror}") from error
        self._next = numbers[-1] + 1 if numbers else 0
        self._tokens = sum(count_tokens(folder, number) for number in numbers)
        self.features = self.features and self._budget > 0

    def add(self, example: Example, features: Array | None) -> Written | None:
        """Take one answer; what was written, where a shard has become full."""
        self._examples.append(example)
        if features is not None:
            self._features.append(features)
        self._gathered += len(example.tokens)
        return self.flush() if self._gathered >= self._most else None

    def flush(self) -> Written | None:
        """Write what there is. Unavailable where the disk does not take it; it is still there then.

        Once the features of a shard would pass the budget, no later ones are gathered.
        """
        if not self._examples:
            return None
        shard = join(self._examples)
        size = sum(part.nbytes for part in self._features)
        whole = self.features and len(self._features) == len(self._examples)
        self.features = whole and size <= self._budget
        try:
            if self.features:  # first: a shard that lies there is complete
                rows = len(shard.tokens)
                write_features(self._folder, self._next, rows, self._taps, self._features)
                self._budget -= size
            write_shard(self._folder, self._next, shard)
        except OSError as error:
            told = error.strerror or error
            raise Unavailable(
                f"cannot write shard {self._next} to {self._folder}: {told}"
            ) from error
        self._tokens += len(shard.tokens)
        written = Written(
            shard=self._next,
            ids=tuple(shard.ids.tolist()),
            tokens=self._tokens,
            features=self.features,
        )
        self._examples, self._features, self._gathered = [], [], 0
        self._next += 1
        return written
