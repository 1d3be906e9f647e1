"""Reading a draft's config, and whether the draft was made for a target. No torch.

`read_draft_config` and `check_pair` run in the supervisor, before anything is loaded, and in the
draft daemon.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from protocol import plugins
from protocol.checkpoints.dialects.base import Dialect
from protocol.checkpoints.draft_facts import DraftCheckpointConfig
from protocol.checkpoints.json_file import read_json
from protocol.errors import DraftMismatch, InternalError, ModelNotFound

CONFIG_FILE: Final = "config.json"
SHIPPED_FOLDER: Final = "checkpoints"
DIALECTS: Final = "protocol.checkpoints.dialects"


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What a draft must agree on; `vocab_size` counts rows of the embedding table."""

    hidden_size: int
    num_layers: int  # 0: not known here
    vocab_size: int


def check_pair(draft: DraftCheckpointConfig, target: TargetFacts) -> None:
    """Raise DraftMismatch, with both values, where `draft` was made for another target."""
    known_layers = target.num_layers > 0
    deepest = max(draft.target_layer_ids)
    wrong: tuple[tuple[bool, str], ...] = (
        (
            draft.hidden_size != target.hidden_size,
            f"hidden size {draft.hidden_size}, the target's is {target.hidden_size}",
        ),
        (
            draft.vocab_size != target.vocab_size,
            f"vocabulary {draft.vocab_size}, the target's is {target.vocab_size}",
        ),
        (
            known_layers and draft.num_target_layers not in (0, target.num_layers),
            f"made for {draft.num_target_layers} layers, the target has {target.num_layers}",
        ),
        (
            known_layers and deepest >= target.num_layers,
            f"taps layer {deepest}, the target's last is {target.num_layers - 1}",
        ),
        (
            draft.mask_token_id >= target.vocab_size,
            f"mask id {draft.mask_token_id}, the target's table has {target.vocab_size} rows",
        ),
    )
    found = [sentence for differs, sentence in wrong if differs]
    if found:
        raise DraftMismatch("the draft was made for another target: " + "; ".join(found))


def canonical(raw: Mapping[str, Any], where: str) -> DraftCheckpointConfig:
    """Map one decoded ``config.json``; `where` names the file in errors."""
    names = plugins.names(DIALECTS, "DIALECT")
    known: list[Dialect] = [plugins.load(DIALECTS, name, "DIALECT", Dialect) for name in names]
    claiming = [dialect for dialect in known if dialect.claims(raw)]
    if len(claiming) != 1:
        raise InternalError(f"{where}: claimed by {[dialect.name for dialect in claiming]}")
    return claiming[0].convert(raw, where)


def read_draft_config(path: Path) -> DraftCheckpointConfig:
    """Read a folder's ``config.json``, or a GGUF file's header, in any dialect that is known.

    Raises CheckpointError (missing or wrong key) or UnsupportedModel (a variant by its name).
    """
    if path.is_file():
        from protocol.checkpoints.gguf_draft import GGUFDraft  # noqa: PLC0415 - imports numpy

        draft = GGUFDraft(path)
        return replace(canonical(draft.config, str(path)), dialect=draft.dialect.name)
    file = path / CONFIG_FILE
    return canonical(read_json(file), str(file))


def shipped_draft(name: str) -> Path:
    """Folder of a draft that is installed with `draft_daemon`, found without importing it."""
    spec = importlib.util.find_spec("draft_daemon")
    roots = () if spec is None else tuple(spec.submodule_search_locations or ())
    for root in roots:
        folder = Path(root) / SHIPPED_FOLDER / name
        if (folder / "config.json").is_file():
            return folder
    raise ModelNotFound(f"no draft named {name!r} is installed with this program")
