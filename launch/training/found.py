"""What shards hold already, for going on behind it and for the card."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from protocol.training import DATA_FOLDER, FEATURES, LEAST_ANSWER

STEPS: Final = 16  # requests of one talk, at most: `Ask.id` is its number times this, and a step


def digest(ids: Iterable[int], repeat: int) -> bytes:
    """Stands for a prompt, the `repeat`-th time."""
    text = ",".join(map(str, ids))
    return hashlib.blake2b(f"{repeat}:{text}".encode(), digest_size=16).digest()


@dataclass
class Found:
    """Counts of what is on the disk."""

    talks: set[int] = field(default_factory=set)
    prompts: set[bytes] = field(default_factory=set)  # digests
    unseen: set[bytes] = field(default_factory=set)  # of the first time, where held out
    tasks: Counter[str] = field(default_factory=Counter)  # sequences
    task_tokens: Counter[str] = field(default_factory=Counter)
    held_out: Counter[str] = field(default_factory=Counter)
    trainable: int = 0  # sequences with an answer that is long enough
    walkable: int = 0  # those that are held out, and greedy
    tokens: int = 0
    answer_tokens: int = 0
    sampled: int = 0
    shards: int = 0
    featured: int = 0  # shards whose features are kept

    @property
    def sequences(self) -> int:
        return sum(self.tasks.values())


def find(folder: Path, repeat_of: Any, check: Callable[[], None] | None = None) -> Found:
    """Read every shard below `folder`; CheckpointError where one is damaged.

    `repeat_of` says of a talk's number which time over the prompts it belongs to; `check` is called
    before each shard, and may raise.
    """
    from protocol.checkpoints.shards import read_shard, shard_numbers  # noqa: PLC0415 - numpy

    found = Found()
    data = folder / DATA_FOLDER
    for number in shard_numbers(data):
        if check is not None:
            check()
        shard = read_shard(data, number)
        found.shards += 1
        found.featured += (data / FEATURES.format(number)).exists()
        found.tokens += len(shard.tokens)
        for at in range(shard.sequences):
            rows = shard.rows(at)
            prompt = int(shard.prompts[at])
            ids: Sequence[int] = shard.tokens[rows.start : rows.start + prompt].tolist()
            talk, task = int(shard.ids[at]) // STEPS, shard.task(at)
            found.talks.add(talk)
            found.prompts.add(digest(ids, repeat_of(talk)))
            found.tasks[task] += 1
            found.task_tokens[task] += rows.stop - rows.start
            found.answer_tokens += rows.stop - rows.start - prompt
            is_sampled, is_held = bool(shard.temperatures[at] > 0), bool(shard.held_out[at])
            found.sampled += is_sampled
            if rows.stop - rows.start - prompt >= LEAST_ANSWER:
                found.trainable += not is_held
                found.walkable += is_held and not is_sampled
            if is_held:
                found.held_out[task] += 1
                found.unseen.add(digest(ids, 0))
    return found
