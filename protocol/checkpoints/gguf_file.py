"""A GGUF file's tensors under published names, one read at a time.

Needs numpy and the `gguf` package (its block formats only), not torch. The arithmetic equals the
GGUF import of `transformers`: blocks become float32, and what is asked for in bfloat16 is rounded,
nearest even.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from protocol.checkpoints.gguf_header import Header, TensorInfo, read_header
from protocol.errors import CheckpointError

Float32 = npt.NDArray[np.float32]
Bits16 = npt.NDArray[np.uint16]
Integers = npt.NDArray[np.int64]

SLAB_BYTES: Final = 8 << 20  # packed bytes dequantised at a time: bounds the float32 copy
INTEGERS: Final[Mapping[int, np.dtype[np.signedinteger[Any]]]] = {
    int(GGMLQuantizationType.I32): np.dtype("<i4"),
    int(GGMLQuantizationType.I64): np.dtype("<i8"),
}


def round_to_bfloat16(values: Float32) -> Bits16:
    """The bit patterns of `values` in bfloat16: nearest, ties to even; NaN stays a quiet NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) >> np.uint32(
        16
    )
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def open_header(path: Path, *, integers: bool = False) -> Header:
    """Read and check the header; tensors of `integers` are refused unless they are wanted."""
    return read_header(path, _block_or_integer if integers else _block)


class GGUFFile:
    """Tensors by the names that `tensors` gives them."""

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self.path = path
        self._tensors = dict(tensors)

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._info(name).shape

    def is_integer(self, name: str) -> bool:
        """Whether the tensor is read with `integers`, and not with the other two."""
        return self._info(name).kind in INTEGERS

    def get(self, name: str) -> Float32:
        """The tensor in float32, rows in published order."""
        info = self._info(name)
        return self._ordered(info, floats(self.path, info))

    def get_bfloat16(self, name: str) -> Bits16:
        """The same, rounded to bfloat16 bit patterns without a float32 copy of the whole."""
        info = self._info(name)
        rows = np.empty((_rows(info), info.shape[-1]), np.uint16)
        for start, slab in _slabs(self.path, info):
            rows[start : start + len(slab)] = round_to_bfloat16(slab)
        return self._ordered(info, rows.reshape(info.shape))

    def integers(self, name: str) -> Integers:
        """A tensor of whole numbers."""
        info = self._info(name)
        found = np.fromfile(self.path, INTEGERS[info.kind], prod(info.shape), offset=info.offset)
        if found.size != prod(info.shape):
            raise CheckpointError(f"{self.path}: the file shrank while it was read")
        whole: Integers = found.astype(np.int64).reshape(info.shape)
        return whole

    def _ordered(self, info: TensorInfo, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """`values`, with rows where the published format has them."""
        del info
        return values

    def _info(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise CheckpointError(f"{self.path}: tensor {name} is missing")
        return self._tensors[name]


def floats(path: Path, info: TensorInfo) -> Float32:
    """The whole tensor in float32, as the file orders it."""
    values = np.empty((_rows(info), info.shape[-1]), np.float32)
    for start, slab in _slabs(path, info):
        values[start : start + len(slab)] = slab
    return values.reshape(info.shape)


def _slabs(path: Path, info: TensorInfo) -> Iterator[tuple[int, Float32]]:
    """(first row, float32 rows) over the tensor, a bounded number of bytes at a time."""
    row_bytes = info.size // _rows(info)
    step = max(1, SLAB_BYTES // row_bytes)
    kind = GGMLQuantizationType(info.kind)
    with path.open("rb") as file:
        file.seek(info.offset)
        for start in range(0, _rows(info), step):
            count = min(step, _rows(info) - start)
            packed = np.fromfile(file, np.uint8, count * row_bytes)
            if packed.size != count * row_bytes:
                raise CheckpointError(f"{path}: the file shrank while it was read")
            yield start, dequantize(packed.reshape(count, row_bytes), kind)


def _rows(info: TensorInfo) -> int:
    return prod(info.shape[:-1])


@cache
def _dequantisable() -> Mapping[int, tuple[int, int]]:
    """Block (elements, bytes) of each ggml type that can be turned into float32."""
    known = {}
    for kind, (elements, size) in GGML_QUANT_SIZES.items():
        try:
            dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            continue
        known[int(kind)] = (elements, size)
    return known


def _block(kind: int) -> tuple[int, int] | None:
    return _dequantisable().get(kind)


def _block_or_integer(kind: int) -> tuple[int, int] | None:
    return (1, INTEGERS[kind].itemsize) if kind in INTEGERS else _block(kind)
