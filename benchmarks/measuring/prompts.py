"""The prompts of a measurement: a file of questions, encoded as `dflashd generate` encodes them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from launch.tokenizer import encode_prompt, load_text_side

DEFAULT: Final = Path(__file__).parents[1] / "prompts.jsonl"


@dataclass(frozen=True)
class Prompt:
    """One user turn as token ids, and what the text ends at."""

    name: str
    task: str
    ids: tuple[int, ...]


def read_prompts(path: Path, model: Path, limit: int) -> tuple[list[Prompt], Sequence[int]]:
    """First turns of the lines' `turns`, through the chat template, and the ids that end a text.

    `limit` prompts are taken evenly over the file, so that a few of them still hold every kind of
    task; 0 takes all. Raises ValueError where the file has no prompt.
    """
    tokenizer, template = load_text_side(model)
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path} has no prompts")
    count = min(limit or len(lines), len(lines))
    rows = [json.loads(lines[index * len(lines) // count]) for index in range(count)]
    prompts = [
        Prompt(
            row["id"], row.get("task", ""), encode_prompt(tokenizer, template, row["turns"][0]).ids
        )
        for row in rows
    ]
    return prompts, sorted(tokenizer.eos_ids)
