"""The features of a shard that was written without them, or whose features were thrown away."""

from pathlib import Path

from protocol.checkpoints.shards import Array, read_shard, write_features
from protocol.ending import EndingSignals
from protocol.errors import ConfigError, InternalError, Unavailable
from protocol.training import CollectConfig, Report, Written
from target_daemon.collecting.decoder import CHUNK_ROWS
from target_daemon.collecting.forwards import Step
from target_daemon.collecting.lines import Out
from target_daemon.collecting.loading import Loaded


def make_features(
    config: CollectConfig, loaded: Loaded, number: int, endings: EndingSignals, out: Out
) -> None:
    """Run every sequence of shard `number` through the target and write its features file.

    What comes out is what the forwards that answered gave, but for the rounding of products of
    another width. CheckpointError for a shard that is broken or of another target.
    """
    folder, target = Path(config.folder), loaded.target
    if not config.taps:
        raise ConfigError("without taps there are no features")
    shard = read_shard(folder, number, target.vocab_size)
    longest = int((shard.starts[1:] - shard.starts[:-1]).max())
    if longest > target.max_positions:
        raise ConfigError(
            f"shard {number} has a sequence of {longest:,} tokens; `max_positions` is "
            f"{target.max_positions:,}"
        )
    records, parts = loaded.records(config, features=True), list[Array]()
    for sequence in range(shard.sequences):
        endings.check()
        tokens = shard.tokens[shard.rows(sequence)].tolist()
        loaded.forwards.start(0)
        for first in range(0, len(tokens) - 1, CHUNK_ROWS):
            step = Step(first, tokens[first : min(first + CHUNK_ROWS, len(tokens) - 1)])
            loaded.forwards.run([step], records)
        made = records.features(0, len(tokens))
        if made is None:
            raise InternalError("no features were taken")
        parts.append(made)
        out.write(
            Report(stage="features", done=sequence + 1, total=shard.sequences, unit="sequences")
        )
    try:
        write_features(folder, number, len(shard.tokens), config.taps, parts)
    except OSError as error:
        raise Unavailable(f"cannot write features to {folder}: {error.strerror}") from error
    ids, tokens_there = tuple(shard.ids.tolist()), len(shard.tokens)
    out.write(Written(shard=number, ids=ids, tokens=tokens_there, features=True))
