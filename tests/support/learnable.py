"""A tiny target whose text can be learned in seconds, and shards of its own greedy answers.

Its head maps every token to the next one of a short cycle, and its layers add little: the text
after any token goes round that token's cycle for ever.
"""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from support.targets import features, load
from support.tiny_target import write_tiny_target

from protocol.checkpoints.shards import Example, join, write_features, write_shard
from protocol.training import DATA_FOLDER, TrainConfig

VOCAB, MASK, CYCLE, TAPS = 97, 3, 5, (0, 2, 3)
FIRST, LAST = 4, 94  # ids of cycles: 18 of 5
PROMPT, ANSWER = 6, 24


def following(token: int) -> int:
    """What the target says after `token`."""
    start = token - (token - FIRST) % CYCLE
    return start + (token - FIRST + 1) % CYCLE


def write_learnable_target(folder: Path) -> Path:
    """Write the checkpoint."""
    write_tiny_target(folder, "llama2", eos_token_id=VOCAB - 1)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(0.1)
        elif name.endswith("norm.weight"):
            tensor.fill_(1.0)
    embed = torch.nn.functional.normalize(tensors["model.embed_tokens.weight"], dim=1) * 3
    tensors["model.embed_tokens.weight"] = embed
    head = torch.zeros_like(embed)
    for token in range(FIRST, LAST):
        head[following(token)] = embed[token]
    tensors["lm_head.weight"] = head
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def answer(target, prompt, count: int):
    """The target's greedy text of `count` tokens after `prompt`, with likeliest next tokens.

    Returns (tokens, top ids, top log-probabilities, bits of the feature rows).
    """
    target.reset(0)
    tokens, k = list(prompt), 4
    top_ids = np.zeros((len(prompt) + count, k), np.int32)
    top_logprobs = np.zeros((len(prompt) + count, k), np.float16)
    start = 0
    while len(tokens) < len(prompt) + count:
        logits = target.verify_batch(0, torch.tensor(tokens[start:]), start, "last")
        best = logits[0].log_softmax(0).topk(k)
        top_ids[len(tokens) - 1] = best.indices
        top_logprobs[len(tokens) - 1] = best.values
        start = len(tokens)
        tokens.append(int(best.indices[0]))
    rows = features(target, 0, 0, start).to(torch.bfloat16)
    bits = torch.cat((rows, torch.zeros_like(rows[:1]))).view(torch.uint16).numpy()
    return np.array(tokens, np.int32), top_ids, top_logprobs, bits


def write_answers(model: Path, folder: Path, *, trained=48, held_out=6, shards=2) -> None:
    """Write shards with features below `folder`, as `dflashd train` lays them out."""
    data = folder / DATA_FOLDER
    data.mkdir(parents=True)
    target, source = load(model, ring_window=128), np.random.default_rng(0)
    for number in range(shards):
        kept, bits = [], []
        for index in range(number, trained + held_out, shards):
            noise = source.integers(FIRST, LAST, PROMPT + index % 3)
            tokens, top_ids, top_logprobs, rows = answer(target, noise.tolist(), ANSWER)
            task = ("even", "odd")[index // shards % 2]
            is_held_out = index < held_out
            kept.append(
                Example(index, task, is_held_out, 0.0, len(noise), tokens, top_ids, top_logprobs)
            )
            bits.append(rows)
        shard = join(kept)
        write_shard(data, number, shard)
        write_features(data, number, len(shard.tokens), TAPS, bits)


def tiny_config(model: Path, folder: Path, **changes) -> TrainConfig:
    """What trains a draft for that target in seconds."""
    settings = {
        "steps": 240,
        "sequences": 4,
        "layers": 2,
        "block_size": 6,
        "anchors": 8,
        "rate": 8e-3,
        "frequent_rows": 60,
        "random_rows": 10,
        "validate_every": 100,
        "average": 0.9,
        "threads": 1,
    }
    return TrainConfig(
        model=str(model),
        folder=str(folder),
        taps=TAPS,
        mask_token_id=MASK,
        **(settings | changes),
    )
