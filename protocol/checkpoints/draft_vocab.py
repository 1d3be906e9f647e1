"""Which ids a draft may propose, where it scores only a part of its target's vocabulary. No torch.

A draft scores ids with its target's head, whose rows cost as much as half of a small model. What it
leaves out it can only not propose: the text stays the same.
"""

from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta
from safetensors import SafetensorError, safe_open

from protocol.errors import CheckpointError, ConfigError

ALL: Final = "all"
LIST: Final = "frequent_ids.json"  # beside a draft's weights: ids, the most useful ones first
MAX_IDS: Final = 1 << 22
MAX_LIST_BYTES: Final = 64 << 20

_Ids = Annotated[
    list[Annotated[int, Meta(ge=0, lt=1 << 31)]], Meta(min_length=1, max_length=MAX_IDS)
]


def read_vocab(stated: str, folder: Path) -> tuple[int, ...]:
    """Ids in ascending order; none at all for ``all``.

    `stated` is ``all``, a number, which takes so many from the list in the draft's `folder`, or a
    file: a JSON list of ids, or a safetensors file with `t2d` (a flag for each id of the target) or
    `d2t` (``target id = draft id + d2t``). Raises ConfigError and CheckpointError.
    """
    if stated == ALL:
        return ()
    if stated.isascii() and stated.isdecimal():
        return _first(int(stated), folder / LIST)
    path = Path(stated)
    ids = _of_tensors(path) if path.suffix == ".safetensors" else _of_list(path)
    return tuple(sorted(ids))


def _first(count: int, path: Path) -> tuple[int, ...]:
    if not path.is_file():
        raise ConfigError(
            f"a draft vocabulary of {count} ids: this draft has no {LIST}, which would say which; "
            "name a file of ids"
        )
    ids = _of_list(path)
    if not 0 < count <= len(ids):
        raise ConfigError(f"a draft vocabulary of {count} ids: {path} has 1 to {len(ids)}")
    return tuple(sorted(ids[:count]))


def _of_list(path: Path) -> list[int]:
    try:
        if path.stat().st_size > MAX_LIST_BYTES:
            raise CheckpointError(f"{path}: larger than {MAX_LIST_BYTES} bytes")
        ids = msgspec.json.decode(path.read_bytes(), type=_Ids)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not a JSON list of token ids: {error}") from error
    return _different(ids, path)


def _of_tensors(path: Path) -> list[int]:
    try:
        with safe_open(path, framework="numpy") as file:
            names = set(file.keys())
            name = next((one for one in ("t2d", "d2t") if one in names), None)
            if name is None:
                raise CheckpointError(f"{path}: neither t2d nor d2t is there")
            tensor = file.get_tensor(name)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path}: {error}") from error
    kinds = "b" if name == "t2d" else "i"
    if tensor.ndim != 1 or not 0 < tensor.size <= MAX_IDS or tensor.dtype.kind not in kinds:
        raise CheckpointError(f"tensor {name}: {tensor.dtype} {list(tensor.shape)} states no ids")
    ids = np.flatnonzero(tensor) if name == "t2d" else np.arange(tensor.size) + tensor
    if ids.size == 0 or ids.min() < 0:
        raise CheckpointError(f"tensor {name}: no ids, or negative ones")
    return _different([int(one) for one in ids], path)


def _different(ids: list[int], path: Path) -> list[int]:
    if len(set(ids)) != len(ids):
        raise CheckpointError(f"{path}: {len(ids) - len(set(ids))} ids are there twice")
    return ids
