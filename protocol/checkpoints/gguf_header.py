"""The header of a GGUF file: metadata and tensor table, every number checked before it is used.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).
The file is hostile until proven otherwise: counts, lengths, offsets and sizes are compared with
what is left of the file before anything is allocated or read (compare CVE-2026-7482).
"""

import struct
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from protocol.errors import CheckpointError, UnsupportedModel

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_KEYS: Final = 1 << 16
MAX_TENSORS: Final = 1 << 16
MAX_KEY_BYTES: Final = 1 << 12
MAX_STRING_BYTES: Final = 1 << 24
MAX_ARRAY: Final = 1 << 22
MAX_DIMS: Final = 4
MAX_ELEMENTS: Final = 1 << 40
MAX_ALIGNMENT: Final = 1 << 20
DEFAULT_ALIGNMENT: Final = 32

# GGUF value types: struct format of the scalars; 8 is a string, 9 an array.
SCALARS: Final[Mapping[int, str]] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
STRING: Final = 8
ARRAY: Final = 9


class TensorInfo(msgspec.Struct, frozen=True):
    """Where one tensor lies: `shape` slowest dimension first, `offset` from the file's start."""

    name: str
    shape: tuple[int, ...]
    kind: int  # ggml type
    offset: int
    size: int  # bytes


class Header(msgspec.Struct, frozen=True):
    """Everything before the tensor data."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class _Cursor:
    """Bounded reads from the front of a file; running out is a CheckpointError."""

    def __init__(self, file: BinaryIO, size: int, where: str) -> None:
        self._file = file
        self.size = size
        self.where = where
        self.offset = 0

    def take(self, count: int, what: str) -> bytes:
        left = self.size - self.offset
        if count > left:
            raise CheckpointError(
                f"{self.where}: truncated or damaged: {what} needs {count} bytes, {left} are left"
            )
        data = self._file.read(count)
        if len(data) != count:
            raise CheckpointError(f"{self.where}: the file shrank while it was read")
        self.offset += count
        return data

    def unpack(self, code: str, what: str) -> tuple[Any, ...]:
        layout = struct.Struct("<" + code)
        return layout.unpack(self.take(layout.size, what))

    def bounded(self, code: str, high: int, what: str) -> int:
        value = int(self.unpack(code, what)[0])
        if value > high:
            raise CheckpointError(f"{self.where}: {what} is {value}, more than the limit {high}")
        return value

    def text(self, limit: int, what: str) -> str:
        raw = self.take(self.bounded("Q", limit, f"length of {what}"), what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.where}: {what} is not UTF-8") from error


def read_header(path: Path, layout: Callable[[int], tuple[int, int] | None]) -> Header:
    """Parse and check the header of `path`.

    `layout` maps a ggml type to (elements, bytes) of one block, or None where it is unknown.
    Raises CheckpointError for a damaged file, UnsupportedModel for a format that is not read here.
    """
    try:
        with path.open("rb") as file:
            return _parse(_Cursor(file, path.stat().st_size, str(path)), layout)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


def _parse(cursor: _Cursor, layout: Callable[[int], tuple[int, int] | None]) -> Header:
    if cursor.take(4, "magic") != MAGIC:
        raise CheckpointError(f"{cursor.where} is not a GGUF file")
    version = int(cursor.unpack("I", "version")[0])
    if version not in VERSIONS:
        # A byte-swapped version has its low half empty.
        detail = "big-endian" if version & 0xFFFF == 0 else f"version {version}"
        raise UnsupportedModel(f"{cursor.where}: {detail} GGUF; versions 2 and 3 are read")
    tensor_count = cursor.bounded("Q", MAX_TENSORS, "number of tensors")
    key_count = cursor.bounded("Q", MAX_KEYS, "number of metadata keys")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.text(MAX_KEY_BYTES, "metadata key")
        if key in metadata:
            raise CheckpointError(f"{cursor.where}: metadata key {key} appears twice")
        metadata[key] = _value(cursor, int(cursor.unpack("I", key)[0]), key)
    rows = [_tensor_row(cursor, layout) for _ in range(tensor_count)]
    alignment = _alignment(metadata, cursor.where)
    start = -(-cursor.offset // alignment) * alignment
    return Header(metadata, _place(rows, start, alignment, cursor))


def _value(cursor: _Cursor, kind: int, key: str) -> Any:
    if kind in SCALARS:
        return cursor.unpack(SCALARS[kind], key)[0]
    if kind == STRING:
        return cursor.text(MAX_STRING_BYTES, key)
    if kind != ARRAY:
        raise CheckpointError(f"{cursor.where}: {key} has unknown value type {kind}")
    inner = int(cursor.unpack("I", key)[0])
    count = cursor.bounded("Q", MAX_ARRAY, f"length of {key}")
    if inner in SCALARS:
        return list(cursor.unpack(f"{count}{SCALARS[inner]}", key))
    if inner == STRING:
        return [cursor.text(MAX_STRING_BYTES, key) for _ in range(count)]
    raise CheckpointError(f"{cursor.where}: {key} is an array of value type {inner}; not supported")


def _tensor_row(
    cursor: _Cursor, layout: Callable[[int], tuple[int, int] | None]
) -> tuple[TensorInfo, int]:
    """One row of the table (its offset still relative), and nothing but facts that are checked."""
    name = cursor.text(MAX_KEY_BYTES, "tensor name")
    count = cursor.bounded("I", MAX_DIMS, f"dimensions of {name}")
    shape = tuple(reversed(cursor.unpack(f"{count}Q", name)))
    kind, offset = cursor.unpack("IQ", name)
    if not shape or min(shape) < 1 or prod(shape) > MAX_ELEMENTS:
        raise CheckpointError(f"{cursor.where}: tensor {name} has the shape {list(shape)}")
    block = layout(kind)
    if block is None:
        raise UnsupportedModel(f"{cursor.where}: tensor {name} has ggml type {kind}; not supported")
    if shape[-1] % block[0]:
        raise CheckpointError(
            f"{cursor.where}: rows of tensor {name} have {shape[-1]} elements; its type stores "
            f"blocks of {block[0]}"
        )
    return TensorInfo(name, shape, kind, offset, prod(shape) // block[0] * block[1]), offset


def _alignment(metadata: Mapping[str, Any], where: str) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
        raise CheckpointError(f"{where}: general.alignment is {value!r}; a power of two is needed")
    return value


def _place(
    rows: list[tuple[TensorInfo, int]], start: int, alignment: int, cursor: _Cursor
) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for info, relative in rows:
        end = start + relative + info.size
        if info.name in tensors:
            raise CheckpointError(f"{cursor.where}: tensor {info.name} appears twice")
        if relative % alignment or end > cursor.size:
            raise CheckpointError(
                f"{cursor.where}: tensor {info.name} lies at {start + relative}..{end}, "
                f"but the file has {cursor.size} bytes, aligned to {alignment}"
            )
        tensors[info.name] = msgspec.structs.replace(info, offset=start + relative)
    return tensors
