"""Memory of the host as tensors: the one function that owns a mapping, and the guest's maps."""

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from math import prod
from typing import Final

import numpy as np
import torch
from torch import Tensor

from protocol import sealed_memory
from protocol.arena_layout import Layout, Place
from protocol.errors import TransportRefused

DTYPES: Final[Mapping[str, torch.dtype]] = {
    "int64": torch.int64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def view_tensors(mapping: mmap.mmap, places: Sequence[Place]) -> dict[str, Tensor]:
    """Make tensors over `mapping`, which lives until the last of them and their views is gone.

    The only place where a mapping becomes tensors. Each storage keeps a ctypes array that keeps
    the NumPy array that holds the mapping's buffer, so the mapping cannot be closed under a
    tensor: ``mapping.close()`` would raise BufferError. ctypes because `torch.frombuffer` warns on
    read-only buffers; a store into such a tensor ends the process, as it should be unthinkable.
    """
    buffer = np.frombuffer(mapping, dtype=np.uint8)
    tensors: dict[str, Tensor] = {}
    for place in places:
        dtype = DTYPES[place.dtype]
        if place.size == 0:
            tensors[place.name] = torch.empty(place.shape, dtype=dtype)
            continue
        raw = (ctypes.c_char * place.size).from_address(buffer.ctypes.data + place.offset)
        raw.keeps = buffer  # type: ignore[attr-defined]  # ctypes objects take attributes
        flat = torch.frombuffer(raw, dtype=dtype, count=prod(place.shape))
        tensors[place.name] = flat.view(place.shape)
    return tensors


def map_arenas(answer: Layout, descriptors: Sequence[int]) -> dict[str, Tensor]:
    """Map every arena read-only; the tensors by name. The places must have been checked."""
    if len(descriptors) != len(answer.arenas):
        raise TransportRefused(
            f"{len(answer.arenas)} arenas were announced, {len(descriptors)} descriptors came"
        )
    tensors: dict[str, Tensor] = {}
    for number, (fd, size) in enumerate(zip(descriptors, answer.arenas, strict=True)):
        mapping = sealed_memory.open_sealed(fd, size)
        inside = [place for place in answer.places if place.arena == number]
        tensors |= view_tensors(mapping, inside)
    return tensors
