"""Whether a folder is a checkpoint that can be run: a look at its files, no tensor is read."""

from pathlib import Path
from typing import Final

from protocol.checkpoints.json_file import read_json
from protocol.errors import CheckpointError, ModelNotFound, UnsupportedModel

CONFIG: Final = "config.json"
WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
TOKENIZER: Final = "tokenizer.json"
MAX_INDEX_BYTES: Final = 64 << 20


def check_folder(folder: Path) -> None:
    """Raise ModelNotFound, CheckpointError or UnsupportedModel with the file that is missing."""
    if not folder.is_dir():
        raise ModelNotFound(f"{folder} is no folder")
    if not (folder / CONFIG).is_file():
        snapshots = sorted(folder.glob("snapshots/*/"))  # of a cache of the hub's client
        hint = f"; {snapshots[-1]} may be meant" if snapshots else ""
        raise CheckpointError(f"{folder} holds no {CONFIG}: not a model folder{hint}")
    read_json(folder / CONFIG)
    for name in weight_files(folder):
        path = folder / name
        if not path.is_file() or path.stat().st_size == 0:
            raise CheckpointError(f"{folder}: {name} is missing or empty")
    if not (folder / TOKENIZER).is_file():
        raise UnsupportedModel(
            f"{folder} holds no {TOKENIZER}; other tokenizer formats are not read"
        )


def weight_files(folder: Path) -> list[str]:
    """Names of the safetensors files, from the index where there is one."""
    if (folder / INDEX).is_file():
        table = read_json(folder / INDEX, MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(table, dict) or not table:
            raise CheckpointError(f"{folder / INDEX}: weight_map is missing or empty")
        names = sorted({str(name) for name in table.values()})
        for name in names:
            if Path(name).name != name:
                raise CheckpointError(f"{folder / INDEX} names {name!r}; not a plain file name")
        return names
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        raise UnsupportedModel(
            f"{folder} holds pickled weights only; they can run code when loaded and are never "
            "read. Convert them to safetensors"
        )
    raise CheckpointError(f"{folder} holds neither {WEIGHTS} nor {INDEX}")
