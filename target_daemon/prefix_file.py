"""The file of one kept prefix: a safetensors file that ends with the SHA-256 of all before it.

It holds the ids, the feature rows and the state; its metadata the format's version and what it
belongs to. Every number in it is checked before it is used.
"""

import hashlib
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import torch
from torch import Tensor

from target_daemon.prefixes import NOBODY, Prefix
from target_daemon.target import StateCopy

VERSION: Final = "1"
MAX_HEADER: Final = 4 << 20
DIGEST: Final = "digest"
STATE: Final = "state."
DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


class Entry(msgspec.Struct, frozen=True):
    """One tensor of a file, as its header says."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]

    @property
    def bytes(self) -> int:
        """What the tensor takes; ValueError for a dtype that is none of ours."""
        if self.dtype not in DTYPES or any(size < 0 for size in self.shape):
            raise ValueError(f"a tensor of {self.dtype} {self.shape}")
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def opened(file: Path) -> BinaryIO:
    """Open it to be read, for this user alone from now on; OSError for a link or another's file."""
    stream = os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    facts = os.fstat(stream.fileno())
    try:
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            raise PermissionError(f"it is no file of this user (of user {facts.st_uid})")
        if stat.S_IMODE(facts.st_mode) & 0o077:
            os.fchmod(stream.fileno(), 0o600)
    except OSError:
        stream.close()
        raise
    return stream


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def size_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def layout(prefix: Prefix, metadata: dict[str, str]) -> tuple[tuple[Tensor, ...], bytes]:
    """What the file holds but for its checksum, in order, and the header that says so."""
    tensors = {"tokens": prefix.tokens, "rows": prefix.rows}
    tensors |= {STATE + name: tensor for name, tensor in prefix.state.tensors.items()}
    header: dict[str, Any] = {"__metadata__": metadata | {"facts": _json(prefix.state.facts)}}
    start = 0
    for name, tensor in tensors.items():
        stop = start + size_of(tensor)
        header[name] = Entry(NAMES[tensor.dtype], tuple(tensor.shape), (start, stop))
        start = stop
    length = hashlib.sha256().digest_size
    header[DIGEST] = Entry("U8", (length,), (start, start + length))
    return tuple(tensors.values()), msgspec.json.encode(header)


def parts(tensors: tuple[Tensor, ...], header: bytes) -> Iterator[bytes]:
    """The file, piece by piece, so that no second copy of the state is made."""
    yield len(header).to_bytes(8, "little")
    yield header
    digest = hashlib.sha256(header)
    for tensor in tensors:
        for part in tensor.unbind(0) if tensor.dim() > 1 else (tensor,):
            data = raw(part)
            digest.update(data)
            yield data
    yield digest.digest()


def _json(facts: Any) -> str:
    return msgspec.json.encode(facts).decode()


def read_header(stream: BinaryIO, file: Path) -> tuple[dict[str, str], dict[str, Entry]]:
    """Metadata and tensors; ValueError unless they fill the file exactly, one behind the other."""
    length = int.from_bytes(stream.read(8), "little")
    size = os.fstat(stream.fileno()).st_size
    if not 2 <= length <= min(MAX_HEADER, size - 8):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    raw = msgspec.json.decode(stream.read(length), type=dict[str, msgspec.Raw])
    metadata = msgspec.json.decode(raw.pop("__metadata__", b"{}"), type=dict[str, str])
    if metadata.get("version", VERSION) != VERSION:
        return metadata, {}  # what follows is laid out as that version says
    entries = {name: msgspec.json.decode(each, type=Entry) for name, each in raw.items()}
    at = 0
    for name, entry in entries.items():
        if entry.data_offsets != (at, at + entry.bytes):
            raise ValueError(f"tensor {name} lies at {entry.data_offsets}")
        at += entry.bytes
    if at != size - 8 - length or not {"tokens", "rows", DIGEST} <= entries.keys():
        raise ValueError(f"{file.name} is not whole")
    return metadata, entries


def read_tensor(stream: BinaryIO, entry: Entry, digest: Any = None) -> Tensor:
    """The next tensor of the stream."""
    tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    view = tensor.reshape(-1).view(torch.uint8).numpy().data
    if stream.readinto(view) != len(view):  # type: ignore[attr-defined]  # of a buffered reader
        raise ValueError("the file ends too soon")
    if digest is not None:
        digest.update(view)
    return tensor


def read_prefix(stream: BinaryIO, file: Path) -> Prefix:
    metadata, entries = read_header(stream, file)
    length = stream.tell() - 8
    stream.seek(8)
    digest = hashlib.sha256(stream.read(length))
    last = entries.pop(DIGEST)
    tensors = {name: read_tensor(stream, entry, digest) for name, entry in entries.items()}
    if raw(read_tensor(stream, last)) != digest.digest():
        raise ValueError("its checksum is wrong")
    state = {name.removeprefix(STATE): each for name, each in tensors.items() if STATE in name}
    facts = msgspec.json.decode(metadata["facts"].encode())
    return Prefix(tensors["tokens"], StateCopy(state, facts), tensors["rows"], NOBODY)
