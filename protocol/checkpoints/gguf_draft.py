"""A GGUF file as a draft's checkpoint: a z-lab config.json, and tensors under z-lab's names."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from protocol import plugins
from protocol.checkpoints.dialects.base import GGUFDialect, GGUFFacts
from protocol.checkpoints.gguf_file import GGUFFile, Integers, open_header
from protocol.checkpoints.gguf_header import TensorInfo
from protocol.errors import CheckpointError, UnsupportedModel

DIALECTS: Final = "protocol.checkpoints.dialects"
_BLOCK_NAME: Final = re.compile(r"blk\.(\d{1,6})\.(\S+)")


class GGUFDraft(GGUFFile):
    """Opening reads and checks the header alone.

    Raises CheckpointError (damaged, incomplete) or UnsupportedModel (a producer, a key or a tensor
    that is not known here, by its name).
    """

    def __init__(self, path: Path) -> None:
        header = open_header(path, integers=True)
        shapes = {name: info.shape for name, info in header.tensors.items()}
        self.dialect = _dialect(header.metadata, str(path))
        self.config = self.dialect.config(GGUFFacts(header.metadata, shapes, str(path)))
        super().__init__(path, _renamed(header.tensors, self.dialect, str(path)))

    def integers(self, name: str) -> Integers:
        """Whole numbers; ``d2t`` as offsets, whatever the producer's file holds."""
        found = super().integers(name)
        if name == "d2t" and not self.dialect.offsets:
            return found - np.arange(found.size)
        return found


def _dialect(metadata: Mapping[str, Any], where: str) -> GGUFDialect:
    architecture = str(metadata.get("general.architecture"))
    known: list[GGUFDialect] = [
        plugins.load(DIALECTS, name, "GGUF", GGUFDialect)
        for name in plugins.names(DIALECTS, "GGUF")
    ]
    for dialect in known:
        if architecture in dialect.architectures:
            return dialect
    names = sorted(name for dialect in known for name in dialect.architectures)
    raise UnsupportedModel(
        f"{where}: architecture {architecture[:80]!r} is no draft that is known here; these are: "
        f"{', '.join(names)}"
    )


def _renamed(
    tensors: Mapping[str, TensorInfo], dialect: GGUFDialect, where: str
) -> dict[str, TensorInfo]:
    found: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        match = _BLOCK_NAME.fullmatch(name)
        inner = dialect.layer.get(match[2]) if match else None
        published = dialect.top.get(name)
        if match and inner is not None:
            published = f"layers.{int(match[1])}.{inner}"
        if published is None:
            raise UnsupportedModel(f"{where}: tensor {name[:80]} has no place in a draft")
        if published in found:
            raise CheckpointError(f"{where}: tensor {name} is there under two names")
        found[published] = info
    return found
