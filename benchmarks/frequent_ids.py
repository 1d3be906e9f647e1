"""Make the list behind ``--draft-vocab N``: a model's ids, the most useful ones first.

``python benchmarks/frequent_ids.py OUT.json [--model M] [--batches N]``

Counted are the ids in what the model itself writes, sampled at temperature 1 in answer to many
kinds of questions, and the most frequent come first. Behind them come all others in the order of
the tokenizer: a byte-pair tokenizer numbers its tokens in the order in which it merged them, which
is by frequency in its own training text. Needs `transformers`. The same seed gives the same list
on the same machine.
"""

import argparse
import itertools
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from launch.models import DEFAULT_NAME, resolve_model
from launch.store import default_home
from launch.tokenizer import encode_prompt, load_text_side

KINDS = (
    "Explain {} to a child.",
    "Write a short story about {}.",
    "List ten facts about {}.",
    "Write a Python function that has to do with {}, with comments.",
    "Write a polite e-mail about {}.",
    "What are the advantages and disadvantages of {}?",
    "Solve a small arithmetic problem about {}, step by step.",
    "Translate a sentence about {} into French and German.",
    "Write a poem about {}.",
    "Summarise the history of {} in one paragraph.",
    "Describe {} as JSON with five fields.",
    "Compare {} with something similar, in a table.",
)
TOPICS = (
    "rivers", "tax law", "football", "the heart", "bread", "trains", "machine learning", "Rome",
    "bees", "chess", "volcanoes", "a bank account", "the moon", "grammar", "coffee", "vaccines",
    "a wedding", "sorting numbers", "the French revolution", "bicycles", "dogs", "jazz", "steel",
    "school", "the ocean", "a job interview", "photosynthesis", "shopping", "the internet",
    "cities", "winter", "probability", "a hospital", "painting", "elections", "gardens",
    "electricity", "friendship", "rice", "space travel",
)  # fmt: skip
BATCH, TOKENS = 32, 128


def prompts(seed: int) -> Iterator[str]:
    """Every kind with every topic, in a mixed order."""
    pairs = list(itertools.product(KINDS, TOPICS))
    random.Random(seed).shuffle(pairs)  # noqa: S311 - no secret
    return itertools.cycle(kind.format(topic) for kind, topic in pairs)


def written(model_path: Path, batches: int, seed: int) -> Iterator[Counter[int]]:
    """Counts of the ids in what the model writes, after each batch."""
    tokenizer, template = load_text_side(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    torch.manual_seed(seed)
    stops, asked, counts = set(tokenizer.eos_ids), prompts(seed), Counter[int]()
    pad = min(stops)
    for number in range(batches):
        rows = [list(encode_prompt(tokenizer, template, next(asked)).ids) for _ in range(BATCH)]
        longest = max(map(len, rows))
        ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=TOKENS,
            pad_token_id=pad,
            eos_token_id=sorted(stops),
        )
        for row in out[:, longest:].tolist():
            end = next((at for at, token in enumerate(row) if token in stops), len(row))
            counts.update(row[: end + 1])
        print(f"batch {number + 1}: {counts.total()} tokens, {len(counts)} different", flush=True)
        yield counts


def ordered(counts: Counter[int], vocab_size: int, stops: Sequence[int]) -> list[int]:
    """All ids: ends, then by count, then as the tokenizer numbers them."""
    seen = sorted(counts, key=lambda token: (-counts[token], token))
    return list(dict.fromkeys([*stops, *seen, *range(vocab_size)]))


def main(arguments: Sequence[str]) -> int:
    """Write the list."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default=DEFAULT_NAME)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--keep", type=int, default=1 << 14, help="so many ids of all")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    model = resolve_model(options.model, home=default_home(os.environ))
    tokenizer, _ = load_text_side(model.path)
    size = json.loads((model.path / "config.json").read_text())["vocab_size"]
    for counts in written(model.path, options.batches, options.seed):
        ids = ordered(counts, size, sorted(tokenizer.eos_ids))[: options.keep]
        options.out.write_text(json.dumps(ids, separators=(",", ":")) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
