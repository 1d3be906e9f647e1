"""What a dialect of published drafts is.

A dialect is one file of this folder that ends in ``DIALECT: Final[Dialect]``, for a config.json,
or in ``GGUF: Final[GGUFDialect]``, for a GGUF file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from protocol.checkpoints.draft_facts import DraftCheckpointConfig

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Dialect:
    """A way to write config.json: whether a file is written so, and what it means.

    `convert` takes the decoded file and its name for errors; it raises CheckpointError and
    UnsupportedModel. Exactly one dialect claims a file.
    """

    name: str
    claims: Callable[[Raw], bool]
    convert: Callable[[Raw, str], DraftCheckpointConfig]


@dataclass(frozen=True, slots=True)
class GGUFFacts:
    """The header of a GGUF file: metadata, and each tensor's shape, slowest dimension first."""

    metadata: Raw
    shapes: Mapping[str, tuple[int, ...]]
    where: str


@dataclass(frozen=True, slots=True)
class GGUFDialect:
    """A producer of GGUF drafts: `config` is the z-lab config.json that describes the same draft.

    `top` and `layer` map its names of tensors to the published ones; a name of `layer` stands
    behind ``blk.N.`` here and behind ``layers.N.`` there. `offsets`: whether ``d2t`` holds offsets,
    as in the other formats, and not the target's ids themselves.
    """

    name: str
    architectures: tuple[str, ...]
    config: Callable[[GGUFFacts], dict[str, Any]]
    top: Mapping[str, str]
    layer: Mapping[str, str]
    offsets: bool = True
