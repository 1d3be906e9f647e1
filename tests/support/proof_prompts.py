"""The prompts of the proofs as token ids: first user turn, through the model's chat template.

``public`` are the 48 prompts that lie beside a checkout, in ``../shared/prompts``; ``own`` were
written for this project and come with it.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launch.token_ids import pack_ids
from launch.tokenizer import encode_prompt, load_text_side

ROOT = Path(__file__).resolve().parents[2]
OWN = ROOT / "tests" / "data" / "proof_prompts.jsonl"
PUBLIC = ROOT.parent / "shared" / "prompts" / "spec_bench_public.jsonl"
MAX_TOKENS = {"own": 32, "public": 128}
Name = Literal["own", "public"]


@dataclass(frozen=True)
class Prompt:
    """One prompt, encoded for the model."""

    id: str
    ids: tuple[int, ...]

    @property
    def digest(self) -> str:
        """Tells whether stored results belong to these very token ids."""
        return hashlib.sha256(pack_ids(self.ids)).hexdigest()[:16]


def read_prompts(name: Name, model: Path) -> list[Prompt]:
    """All prompts of a set, in the file's order; FileNotFoundError where it is absent."""
    path = {"own": OWN, "public": PUBLIC}[name]
    tokenizer, template = load_text_side(model)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    texts = {line["id"]: line["text"] if "text" in line else line["turns"][0] for line in lines}
    return [
        Prompt(key, encode_prompt(tokenizer, template, text).ids) for key, text in texts.items()
    ]
