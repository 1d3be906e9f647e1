"""Which draft goes with a model: the one that was named, the one that is installed, or none.

A name is, in this order: a draft that is installed with this program, an existing folder or GGUF
file, a model id of the Hugging Face hub.
"""

from pathlib import Path
from typing import Final

from launch.models import GGUF_SUFFIX, HUB_ID, LocalModel, existing
from launch.progress import Progress, Silent
from protocol.checkpoints.draft_config import read_draft_config, shipped_draft
from protocol.checkpoints.draft_vocab import ALL, read_vocab
from protocol.checkpoints.folder import CONFIG, weight_files
from protocol.errors import CheckpointError, ConfigError, ModelNotFound

NONE: Final = "none"
# Drafts that are installed with this program, by the name of the model they were made for.
SHIPPED: Final = {"smollm2-135m": "smollm2-135m-dflash"}
SHIPPED_VOCAB: Final = "8192"  # their --draft-vocab, where none is said: see benchmarks/README.md


def resolve_draft(
    name: str | None, model: LocalModel, progress: Progress | None = None
) -> Path | None:
    """Return the draft to use with `model`, a folder or GGUF file, or None: autoregressive.

    `name` is what `find_draft` takes, ``none``, or None for the default. Whether the draft was
    made for this model is checked by `launch.prepare`. Raises what `find_draft` raises.
    """
    if name is None:
        name = SHIPPED.get(model.name, NONE) if model.source == "default" else NONE
    return None if name == NONE else find_draft(name, progress).path


def named_draft(name: str | None, model: str, progress: Progress | None = None) -> Path:
    """The folder of a draft by itself: that named, or the installed one for the model's name.

    The model need not be here. Raises ModelNotFound, and what `find_draft` does.
    """
    if name is None and model not in SHIPPED:
        raise ModelNotFound(f"no draft is installed for {model[:80]!r}: name one with --draft")
    return find_draft(SHIPPED[model] if name is None else name, progress).path


def draft_vocab(stated: str | None, draft: Path | None) -> str:
    """What `protocol.checkpoints.draft_vocab.read_vocab` takes: as said, or this draft's default.

    Raises what `read_vocab` raises, before anything is started.
    """
    if draft is None:
        return ALL
    shipped = draft.name in SHIPPED.values() and draft == shipped_draft(draft.name)
    chosen = stated or (SHIPPED_VOCAB if shipped else ALL)
    if chosen != ALL and not chosen.isdecimal():
        file = existing(chosen)
        if file is None:
            raise ConfigError(
                f"--draft-vocab {chosen[:80]!r}: neither a number of ids, nor a file that is "
                f"there, nor {ALL}"
            )
        chosen = str(file.absolute())
    read_vocab(chosen, draft)
    return chosen


def find_draft(name: str, progress: Progress | None = None) -> LocalModel:
    """Find the draft `name`, or fetch it from the hub.

    Raises ModelNotFound, and for a draft of the hub CheckpointError, UnsupportedModel, Unavailable
    (offline) and PermissionRefused.
    """
    if name in SHIPPED.values():
        return LocalModel(name=name, path=shipped_draft(name), source="installed")
    folder = existing(name)
    if folder is not None and (file := _gguf(folder)) is not None:
        return LocalModel(name=file.stem, path=file.resolve(), source="gguf")
    if folder is not None and folder.is_dir():
        if not (folder / CONFIG).is_file():
            raise ModelNotFound(f"{name} holds no {CONFIG}: not a draft folder")
        return LocalModel(name=folder.resolve().name, path=folder.resolve(), source="folder")
    if HUB_ID.fullmatch(name):
        from launch.hub import fetch_from_hub  # noqa: PLC0415 - imports an HTTP client

        told = progress or Silent()
        path, fetched = fetch_from_hub(name, told, allow_pull=True, check=check_draft)
        return LocalModel(name=name, path=path, source="hub", fetched=fetched)
    installed = ", ".join(SHIPPED.values())
    raise ModelNotFound(
        f"no draft {name!r}: no such folder, {GGUF_SUFFIX} file or hub id (owner/name); "
        f"installed: {installed}"
    )


def _gguf(path: Path) -> Path | None:
    """The GGUF file that `path` is, or the one that a folder without a config holds."""
    if path.is_file():
        if path.suffix != GGUF_SUFFIX:
            raise ModelNotFound(
                f"{path} is a file; a draft is a folder with {CONFIG}, or a {GGUF_SUFFIX} file"
            )
        return path
    files = sorted(path.glob(f"*{GGUF_SUFFIX}"))
    return files[0] if len(files) == 1 and not (path / CONFIG).exists() else None


def check_draft(folder: Path) -> None:
    """Raise for a folder whose config is no draft's, or whose weights are not all there."""
    read_draft_config(folder)
    for file in weight_files(folder):
        path = folder / file
        if not path.is_file() or path.stat().st_size == 0:
            raise CheckpointError(f"{folder}: {file} is missing or empty")
