"""Files that appear whole or not at all."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from protocol.storage_errors import storage_error
from protocol.storage_sync import sync_folder

MODE: Final = 0o644  # a checkpoint is for whoever may look into its folder


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A hidden path to write to, which takes the place of `path` when the block has ended well.

    A disk that refuses is a typed error.
    """
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield hidden
        hidden.chmod(MODE)  # safetensors writes files for their owner alone
        with hidden.open("rb") as file:
            os.fsync(file.fileno())
        hidden.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise storage_error(path, error) from error
    finally:
        hidden.unlink(missing_ok=True)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file."""
    with whole(path) as hidden:
        try:
            save_file(dict(tensors), hidden, metadata={"format": "pt", **metadata})
        except SafetensorError as error:  # which has the system's error as its text alone
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(int(number[1]) if number else 0, str(error)) from error


def write_text(path: Path, text: str) -> None:
    """Write a text file."""
    with whole(path) as hidden:
        hidden.write_text(text)
