"""Whether memory and disk are enough for what is to be made, with the numbers."""

import shutil
from pathlib import Path
from typing import Final

from protocol.checkpoints.folder import weight_files
from protocol.checkpoints.target_config import ModelConfig
from protocol.errors import InsufficientMemory, TemporaryFailure
from protocol.memory import Available, megabytes
from protocol.training import CACHED_SHARDS, FEATURES, SHARD_TOKENS

LIKELIEST: Final = 16  # next tokens with their log-probabilities, in a shard
TOKEN_BYTES: Final = 4 + LIKELIEST * (4 + 2)  # of a shard
FEATURE_BYTES: Final = 2  # of each number
AUTO_SHARE: Final = 0.25  # of the free disk, for features
_FEATURE_FILES: Final = FEATURES.partition("{")[0] + "*"
RESERVE: Final = 500_000_000  # of the disk, for checkpoint, state and logs
TRAINED_BYTES: Final = 16  # of a parameter: itself, its gradient, AdamW's two moments
PROCESS_BYTES: Final = 400_000_000  # of an interpreter with its libraries


def feature_budget(stated: int | None, folder: Path) -> int:
    """Bytes for features: as stated, else at most a part of the disk that is free of others."""
    if stated is not None:
        return stated
    return int((shutil.disk_usage(folder).free + features_there(folder)) * AUTO_SHARE)


def features_there(folder: Path) -> int:
    """Bytes of features that earlier runs left, which count to the budget."""
    return sum(file.stat().st_size for file in folder.glob(_FEATURE_FILES))


def feature_bytes(budget: int, tokens: int, numbers: int, ranks: int) -> int:
    """On the disk, of the features of `tokens` with `numbers` each, where `budget` bounds the kept.

    The others are made again, and lie there for as long as one of `ranks` uses them. 0
    tokens: as many as time allows, so that the bound has to be there.
    """
    if not tokens:
        return budget
    row = numbers * FEATURE_BYTES
    used = ranks * CACHED_SHARDS * SHARD_TOKENS * row
    kept = min(budget, tokens * row)
    return kept + min(tokens * row - kept, used)


def check_disk(folder: Path, tokens: int, features: int) -> None:
    """Raise TemporaryFailure where the disk has no room for `tokens` and bytes of `features`."""
    shards, free = tokens * TOKEN_BYTES, shutil.disk_usage(folder).free
    needed = shards + features + RESERVE
    if free < needed:
        raise TemporaryFailure(
            f"{folder} has {megabytes(free)} free, and {megabytes(needed)} are needed: "
            f"{megabytes(shards)} for {tokens:,} tokens, {megabytes(features)} for features "
            f"(--feature-cache), {megabytes(RESERVE)} for the draft and its training"
        )


def check_memory(model: Path, config: ModelConfig, layers: int, free: Available) -> None:
    """Raise InsufficientMemory where target and draft cannot lie side by side while it trains.

    The processes count what they need in full when they start; this is the part that is known
    before anything is started.
    """
    stored = sum((model / name).stat().st_size for name in weight_files(model))
    target = stored * (2 if config.dtype in {"bfloat16", "float16"} else 1)
    inner = config.intermediate_size or 4 * config.hidden_size
    draft = layers * config.hidden_size * (4 * config.hidden_size + 3 * inner) * TRAINED_BYTES
    needed = target + draft + PROCESS_BYTES
    if free.size < needed:
        raise InsufficientMemory(
            f"training needs at least {megabytes(needed)}, and {megabytes(free.size)} are "
            f"available ({free.source}): {megabytes(target)} for the target, {megabytes(draft)} "
            f"for {layers} layers in training, {megabytes(PROCESS_BYTES)} for the process"
        )
