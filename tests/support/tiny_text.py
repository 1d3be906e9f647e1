"""A pair that speaks: tiny checkpoints with a tokenizer of one token per printable character."""

import json
from pathlib import Path

from support.tiny_pair import VOCAB, write_pair
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

POSITIONS = 20_000  # room for a generation that lasts until it is interrupted
SPECIAL = {"<s>": 0, "</s>": VOCAB - 1}
CHARACTERS = {chr(code): code - 31 for code in range(32, 127)}
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[answer]"


def write_speaking_pair(folder: Path) -> tuple[Path, Path]:
    """Write a target with tokenizer and chat template, and its draft."""
    target, draft = write_pair(folder)
    edit_json(target / "config.json", max_position_embeddings=POSITIONS)
    write_tokenizer(target)
    return target, draft


def write_tokenizer(target: Path) -> None:
    """Give a target of `VOCAB` ids its text side."""
    tokenizer = Tokenizer(models.WordLevel({**SPECIAL, **CHARACTERS}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(target / "tokenizer.json"))
    (target / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "</s>"})
    )


def ids_of(text: str) -> list[int]:
    return [CHARACTERS[character] for character in text]


def text_of(ids) -> str:
    names = {index: character for character, index in CHARACTERS.items()}
    return "".join(names.get(index, "") for index in ids)


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
