"""What follows from a target for its draft: which layers are tapped, and which id masks.

A draft that is begun with has settled both already.
"""

from pathlib import Path
from typing import Final

from launch.chat_template import SPECIAL_NAMES, TOKENIZER_CONFIG, load_chat_template, special_texts
from launch.tokenizer import TextTokenizer
from protocol.checkpoints.draft_config import TargetFacts, check_pair, read_draft_config
from protocol.checkpoints.draft_facts import DraftCheckpointConfig
from protocol.checkpoints.json_file import read_json
from protocol.checkpoints.target_config import ModelConfig
from protocol.errors import ConfigError, UsageError

TAPS: Final = 5
FIRST_TAP: Final = 1
BEHIND_LAST_TAP: Final = 3  # layers from the last tap to the end, as in the published drafts


def read_start(start: Path | None, model: ModelConfig, layers: int) -> DraftCheckpointConfig | None:
    """The draft that is begun with, if any; DraftMismatch or UsageError where it cannot be."""
    if start is None:
        return None
    facts = read_draft_config(start)
    check_pair(facts, TargetFacts(model.hidden_size, model.num_layers, model.vocab_size))
    if len(facts.layers) != layers:
        raise UsageError(f"--layers {layers}: --start {start} has {len(facts.layers)}")
    return facts


def even_taps(layers: int) -> tuple[int, ...]:
    """`TAPS` layers at even distances, from the second to the third from the end."""
    first = min(FIRST_TAP, layers - 1)
    span = max(first, layers - BEHIND_LAST_TAP) - first
    return tuple(sorted({first + int(at * span / (TAPS - 1) + 0.5) for at in range(TAPS)}))


def parse_taps(
    stated: str, layers: int, start: DraftCheckpointConfig | None = None
) -> tuple[int, ...]:
    """``auto``, or ascending numbers of layers with commas between; UsageError names what is not.

    Layer 0 is the first one; its features are what it puts out.
    """
    if stated == "auto":
        return even_taps(layers) if start is None else start.target_layer_ids
    words = [word.strip() for word in stated.split(",")]
    if not all(word.isascii() and word.isdecimal() and len(word) < 6 for word in words):
        raise UsageError(f"--taps {stated[:80]!r}: auto, or numbers of layers as in 1,8,14")
    taps = tuple(int(word) for word in words)
    if list(taps) != sorted(set(taps)) or taps[-1] >= layers:
        raise UsageError(
            f"--taps {stated[:80]}: ascending numbers below {layers}, the target's layers"
        )
    return taps


def mask_id(
    folder: Path, tokenizer: TextTokenizer, rows: int, start: DraftCheckpointConfig | None = None
) -> int:
    """An id of the target's table, of `rows`, that no text contains.

    What the draft `start` knows; else the tokenizer's own mask token; else the first row behind the
    tokenizer's ids, which is what the published drafts of padded tables take; else the first
    special token that neither begins, ends nor pads a text, nor stands in the chat template.
    ConfigError where there is none.
    """
    if start is not None:
        return start.mask_token_id
    path = folder / TOKENIZER_CONFIG
    named = special_texts(read_json(path)) if path.is_file() else {}
    if "mask_token" in named:
        index = tokenizer.index(named["mask_token"])
        if index is not None and index < rows:
            return index
    if tokenizer.vocab_size < rows:
        return tokenizer.vocab_size
    used = {named[name] for name in SPECIAL_NAMES if name in named}
    template = load_chat_template(folder)
    for index in sorted(tokenizer.special_ids - tokenizer.eos_ids):
        text = tokenizer.token(index) or ""
        in_use = text in used or (template is not None and text in template.source)
        if index < rows and not in_use:
            return index
    raise ConfigError(
        f"{folder}: every id of its {rows} may stand in a text, and a draft needs one that does "
        "not: no mask token, no row behind the tokenizer's ids, and no special token is free"
    )
