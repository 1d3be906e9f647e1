"""Files that appear whole or not at all."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from safetensors.torch import save_file
from torch import Tensor

MODE: Final = 0o644  # a checkpoint is for whoever may look into its folder


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A hidden path to write to, which takes the place of `path` when the block has ended well."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield hidden
        hidden.chmod(MODE)  # safetensors writes files for their owner alone
        with hidden.open("rb") as file:
            os.fsync(file.fileno())
        hidden.replace(path)
    finally:
        hidden.unlink(missing_ok=True)
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file."""
    with whole(path) as hidden:
        save_file(dict(tensors), hidden, metadata={"format": "pt", **metadata})


def write_text(path: Path, text: str) -> None:
    """Write a text file."""
    with whole(path) as hidden:
        hidden.write_text(text)
