"""Shards of made-up sequences, for tests of whoever reads them."""

from pathlib import Path

import numpy as np

from protocol.checkpoints.shards import Example, join, write_features, write_shard


def kept(
    number: int, *, prompt=4, answer=6, vocab=97, k=3, task="made", held_out=False, temperature=0.0
) -> Example:
    """A random sequence; its likeliest tokens begin with the one that follows."""
    source = np.random.default_rng(number)
    count = prompt + answer
    tokens = source.integers(0, vocab, count).astype(np.int32)
    top_ids = np.zeros((count, k), np.int32)
    top_logprobs = np.zeros((count, k), np.float16)
    for row in range(prompt - 1, count - 1):
        others = source.choice(np.delete(np.arange(vocab), tokens[row + 1]), k - 1, replace=False)
        top_ids[row] = [tokens[row + 1], *others]
        top_logprobs[row] = np.log(np.linspace(0.8, 0.1, k))
    return Example(number, task, held_out, temperature, prompt, tokens, top_ids, top_logprobs)


def write_made_shard(folder: Path, number: int, sequences, *, taps=(), width: int = 0):
    """Write `sequences` (of `kept`) as a shard, with random features of `width` a tap."""
    folder.mkdir(parents=True, exist_ok=True)
    shard = join(sequences)
    write_shard(folder, number, shard)
    if width:
        rows, source = len(shard.tokens), np.random.default_rng(number)
        values = source.standard_normal((rows, len(taps) * width)).astype(np.float32)
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)  # cut off, which is a bfloat16
        bits[shard.starts[1:] - 1] = 0
        write_features(folder, number, rows, taps, [bits])
    return shard
