"""Which draft goes with a model: the one that was named, the one that is installed, or none."""

from pathlib import Path
from typing import Final

from launch.models import LocalModel
from protocol.checkpoints.draft_config import shipped_draft
from protocol.errors import ModelNotFound

NONE: Final = "none"
# Drafts that are installed with this program, by the name of the model they were made for.
SHIPPED: Final = {"smollm2-135m": "smollm2-135m-dflash"}


def resolve_draft(name: str | None, model: LocalModel) -> Path | None:
    """Return the folder of the draft to use with `model`, or None for autoregressive generation.

    `name` is a folder, the name of an installed draft, ``none``, or None for the default. Whether
    the draft was made for this model is checked by `launch.prepare`. Raises ModelNotFound.
    """
    if name is None:
        name = SHIPPED.get(model.name, NONE) if model.source == "default" else NONE
    return None if name == NONE else _folder(name)


def _folder(name: str) -> Path:
    if name in SHIPPED.values():
        return shipped_draft(name)
    folder = Path(name).expanduser()
    if not folder.is_dir():
        installed = ", ".join(SHIPPED.values())
        raise ModelNotFound(f"no draft {name!r}: no such folder; installed: {installed}")
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{name} holds no config.json: not a draft folder")
    return folder.resolve()
