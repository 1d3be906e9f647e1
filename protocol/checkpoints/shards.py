"""Shards of training data, as `protocol.training` lays them out: read checked, written whole.

NumPy alone: bfloat16 comes and goes as its bits, uint16, which torch takes for what they are
(``torch.from_numpy(rows).view(torch.bfloat16)``). A file appears under its name only when all of it
is on the disk.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from protocol.errors import CheckpointError
from protocol.storage_sync import sync_folder
from protocol.training import FEATURES, SHARD

Array = npt.NDArray[Any]

# Tensor -> its NumPy type, and its dimensions.
LAYOUT: Final = {
    "tokens": ("int32", 1),
    "starts": ("int64", 1),
    "prompts": ("int32", 1),
    "ids": ("int64", 1),
    "tasks": ("int32", 1),
    "held_out": ("uint8", 1),
    "temperatures": ("float32", 1),
    "top_ids": ("int32", 2),
    "top_logprobs": ("float16", 2),
}
CODES: Final = {
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "float32": "F32",
    "float16": "F16",
    "uint16": "BF16",  # of features alone
}
MAX_BYTES: Final = 1 << 32  # of a shard, which is read as a whole; features are mapped
MAX_TASKS: Final = 1 << 16
ANY_VOCAB: Final = 1 << 31
ROUNDING: Final = 0.01  # above 0, of a log-probability that was computed in float32


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One whole sequence on its way into a shard, `n` tokens."""

    id: int
    task: str
    held_out: bool
    temperature: float
    prompt: int  # tokens
    tokens: Array  # [n] int32
    top_ids: Array  # [n, k] int32
    top_logprobs: Array  # [n, k] float16


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """The tensors of one shard, and what its metadata calls its tasks."""

    tokens: Array
    starts: Array
    prompts: Array
    ids: Array
    tasks: Array
    held_out: Array
    temperatures: Array
    top_ids: Array
    top_logprobs: Array
    task_names: tuple[str, ...]

    @property
    def sequences(self) -> int:
        """How many there are."""
        return len(self.ids)

    def rows(self, sequence: int) -> slice:
        """Where one sequence lies in `tokens`, `top_ids`, `top_logprobs` and the features."""
        return slice(int(self.starts[sequence]), int(self.starts[sequence + 1]))

    def task(self, sequence: int) -> str:
        """The task of one sequence."""
        return self.task_names[int(self.tasks[sequence])]


def join(sequences: Sequence[Example]) -> Shard:
    """One shard of at least one sequence."""
    names = tuple(sorted({each.task for each in sequences}))
    lengths = [len(each.tokens) for each in sequences]
    return Shard(
        tokens=np.concatenate([each.tokens for each in sequences]).astype(np.int32),
        starts=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        prompts=np.array([each.prompt for each in sequences], dtype=np.int32),
        ids=np.array([each.id for each in sequences], dtype=np.int64),
        tasks=np.array([names.index(each.task) for each in sequences], dtype=np.int32),
        held_out=np.array([each.held_out for each in sequences], dtype=np.uint8),
        temperatures=np.array([each.temperature for each in sequences], dtype=np.float32),
        top_ids=np.concatenate([each.top_ids for each in sequences]).astype(np.int32),
        top_logprobs=np.concatenate([each.top_logprobs for each in sequences]).astype(np.float16),
        task_names=names,
    )


def shard_numbers(folder: Path) -> tuple[int, ...]:
    """Numbers of the shards that lie in `folder`, ascending; none where there is no folder."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error.strerror}") from error
    found = (re.fullmatch(r"shard-(\d{5,9})\.safetensors", name) for name in names)
    numbers = (int(match[1]) for match in found if match is not None)
    return tuple(sorted(number for number in numbers if SHARD.format(number) in names))


def read_shard(folder: Path, number: int, vocab: int = ANY_VOCAB) -> Shard:
    """Read one shard of ids below `vocab` and check all of it; CheckpointError says what is wrong.

    Offsets ascend and end with the tokens, every sequence has a prompt and more, and every id and
    index is one that exists.
    """
    file = folder / SHARD.format(number)
    metadata, tensors = _read(file)
    try:
        names = msgspec.json.decode(metadata.get("tasks", ""), type=tuple[str, ...])
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{file}: metadata `tasks`: {error}") from error
    shard = Shard(**tensors, task_names=names)
    wrong = _defect(shard, vocab)
    if wrong:
        raise CheckpointError(f"{file}: {wrong}")
    return shard


def count_tokens(folder: Path, number: int) -> int:
    """Tokens of a shard, by its header alone."""
    file = folder / SHARD.format(number)
    with _opened(file) as handle:
        if "tokens" not in handle.keys():  # noqa: SIM118 - a handle is no mapping
            raise CheckpointError(f"{file}: no tensor `tokens`")
        return int(np.prod(handle.get_slice("tokens").get_shape()))


def clear_remains(folder: Path) -> None:
    """Remove what a process that was killed left behind: half a file, features without a shard."""
    numbers = shard_numbers(folder)
    for name in os.listdir(folder) if folder.is_dir() else ():
        half = re.fullmatch(r"\.(shard|features)-\d+\.safetensors\.\d+", name)
        lone = re.fullmatch(r"features-(\d+)\.safetensors", name)
        if half or (lone and int(lone[1]) not in numbers):
            (folder / name).unlink(missing_ok=True)


def map_features(folder: Path, number: int, shard: Shard, taps: Sequence[int]) -> Array | None:
    """Features [n, taps * hidden] of `shard` as bits of bfloat16, mapped; None without a file.

    The mapping is private and lives as long as the array. CheckpointError where the file is
    damaged, or made for other taps or another shard.
    """
    file = folder / FEATURES.format(number)
    if not file.exists():
        return None
    with _opened(file) as handle:
        if list(handle.keys()) != ["features"]:
            raise CheckpointError(f"{file}: one tensor, `features`, is expected")
        part, metadata = handle.get_slice("features"), handle.metadata() or {}
        shape, code = tuple(part.get_shape()), part.get_dtype()
    rows = len(shard.tokens)
    known = code == "BF16" and len(shape) == 2 and shape[0] == rows
    if not known or not shape[1] or shape[1] % max(1, len(taps)):
        raise CheckpointError(
            f"{file}: features of {rows} rows in BF16 are expected, found {code} {list(shape)}"
        )
    told = msgspec.json.encode(tuple(taps)).decode()
    if metadata.get("taps") != told:
        raise CheckpointError(f"{file}: made for taps {metadata.get('taps')}, not {told}")
    size = 2 * shape[0] * shape[1]
    # The one tensor fills the file behind the header, as the format wants it.
    at = file.stat().st_size - size
    return np.memmap(file, dtype=np.uint16, mode="c", offset=at, shape=shape)


def write_shard(folder: Path, number: int, shard: Shard) -> None:
    """Write one shard, whole or not at all; OSError as it arises."""
    tensors = {name: getattr(shard, name) for name in LAYOUT}
    metadata = {"tasks": msgspec.json.encode(shard.task_names).decode()}
    shapes = {name: (tensor.dtype.name, tensor.shape) for name, tensor in tensors.items()}
    _write(folder / SHARD.format(number), metadata, shapes, tensors.values())


def write_features(
    folder: Path, number: int, rows: int, taps: Sequence[int], parts: Iterable[Array]
) -> None:
    """Write features [rows, width], which come as `parts` [any, width] of bits of bfloat16."""
    every = list(parts)
    width = every[0].shape[1]
    if sum(len(part) for part in every) != rows:
        raise ValueError(f"{sum(len(part) for part in every)} rows of features for {rows} tokens")
    metadata = {"taps": msgspec.json.encode(tuple(taps)).decode()}
    shapes = {"features": ("uint16", (rows, width))}
    _write(folder / FEATURES.format(number), metadata, shapes, every)


def _write(
    file: Path,
    metadata: Mapping[str, str],
    shapes: Mapping[str, tuple[str, tuple[int, ...]]],
    parts: Iterable[Array],
) -> None:
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, (kind, shape) in shapes.items():
        stop = at + int(np.prod(shape)) * np.dtype(kind).itemsize
        header[name] = {"dtype": CODES[kind], "shape": shape, "data_offsets": (at, stop)}
        at = stop
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with beside.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for part in parts:
                stream.write(np.ascontiguousarray(part).data)
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(file.parent)


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="numpy")
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise CheckpointError(f"{file} is damaged or truncated: {error}") from error


def _read(file: Path) -> tuple[dict[str, str], dict[str, Array]]:
    with _opened(file) as handle:
        size = file.stat().st_size
        if size > MAX_BYTES:
            raise CheckpointError(f"{file}: {size:,} bytes; a shard has at most {MAX_BYTES:,}")
        if set(handle.keys()) != LAYOUT.keys():
            raise CheckpointError(f"{file}: tensors {sorted(handle.keys())} are no shard's")
        found = {}
        for name, (kind, dimensions) in LAYOUT.items():
            code, shape = (part := handle.get_slice(name)).get_dtype(), part.get_shape()
            if code != CODES[kind] or len(shape) != dimensions:
                raise CheckpointError(f"{file}: tensor {name} is {code} {list(shape)}")
            found[name] = handle.get_tensor(name)
        return handle.metadata() or {}, found


def _defect(shard: Shard, vocab: int) -> str:
    """What is wrong with a shard whose types are right; empty if nothing is."""
    tokens, count = len(shard.tokens), len(shard.ids)
    lists = (shard.prompts, shard.tasks, shard.held_out, shard.temperatures)
    if not count or len(shard.starts) != count + 1 or any(len(each) != count for each in lists):
        return f"{count} ids, and lists of {sorted(len(each) for each in (*lists, shard.starts))}"
    if shard.top_ids.shape != shard.top_logprobs.shape or len(shard.top_ids) != tokens:
        return f"likeliest tokens {list(shard.top_ids.shape)} beside {tokens} tokens"
    lengths = np.diff(shard.starts)
    if not _within(shard.starts, tokens + 1) or lengths.sum() != tokens or (lengths < 2).any():
        return "`starts` do not ascend from 0 to the number of tokens"
    if (shard.prompts < 1).any() or (shard.prompts >= lengths).any():
        return "a prompt is empty, or has no answer"
    if len(shard.task_names) > MAX_TASKS or not _within(shard.tasks, len(shard.task_names)):
        return f"a task is none of the {len(shard.task_names)} that are named"
    if not (_within(shard.tokens, vocab) and _within(shard.top_ids, vocab)):
        return f"an id is outside 0..{vocab - 1}"
    if not (_within(shard.held_out, 2) and bool((shard.ids >= 0).all())):
        return "a number is not one that it can be"
    if not (_within(shard.temperatures, np.inf) and _within(ROUNDING - shard.top_logprobs, np.inf)):
        return "a number is not finite, or a log-probability is above 0"
    return ""


def _within(values: Array, bound: float) -> bool:
    return bool(((values >= 0) & (values < bound)).all())
