"""Kept prefixes on disk: one safetensors file each, of one model, whole or not used at all.

A file's name is a digest of what it is for. It holds the ids, the feature rows and the state; its
metadata the format's version and the `identity` of the model and of how it computes; its last
tensor the SHA-256 of all before it. What is damaged is left alone with a warning, what belongs to
another model without one. Files that were not used for longest are removed to stay in the budget.
"""

import hashlib
import logging
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

import msgspec
import torch
from torch import Tensor

from protocol.errors import ConfigError
from protocol.run_directory import is_private
from target_daemon.prefixes import NOBODY, Prefix, common_length
from target_daemon.target import StateCopy

log = logging.getLogger(__name__)

VERSION: Final = "1"
SUFFIX: Final = ".safetensors"
UNFINISHED: Final = ".unfinished"
MAX_HEADER: Final = 4 << 20
MAX_FILES: Final = 4096
MAX_BYTES: Final = 2 << 30  # of one file: it is read and written between two messages
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


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A prefix in a file: enough to know whether it helps."""

    path: Path
    tokens: Tensor
    oldest: int
    number: int = NOBODY

    @property
    def committed(self) -> int:
        return self.tokens.shape[0]


class PrefixFolder:
    """At most `budget` bytes of files in a folder of this user's alone."""

    def __init__(self, path: Path, identity: str, budget: int) -> None:
        self._path = path
        self._identity = identity
        self._budget = budget
        self.entries: list[Stored] = []

    @classmethod
    def open(cls, path: Path, identity: str, budget: int) -> Self:
        """Make the folder, or read what is there; ConfigError where others could look into it."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the prefix store {path}: {error.strerror}") from error
        if not is_private(path):
            raise ConfigError(f"the prefix store {path} is not this user's alone (mode 0700)")
        folder = cls(path, identity, budget)
        for file in folder._files():
            try:
                folder._read_entry(file)
            except (OSError, ValueError, msgspec.MsgspecError) as error:
                log.warning("kept prefix %s is damaged, and is ignored: %s", file.name, error)
        return folder

    def _files(self) -> list[Path]:
        found = [file for file in self._path.iterdir() if file.suffix == SUFFIX]
        return sorted(found, key=_used)[-MAX_FILES:]

    def _read_entry(self, file: Path) -> None:
        with _opened(file) as stream:
            metadata, entries = _header(stream, file)
            if (metadata.get("version"), metadata.get("identity")) != (VERSION, self._identity):
                return  # another model's, or of another time
            tokens = _tensor(stream, entries["tokens"])
            rows = entries["rows"].shape[0]
        if tokens.dtype != torch.int64 or tokens.dim() != 1 or not rows <= tokens.shape[0]:
            raise ValueError("ids and rows do not fit")
        self.entries.append(Stored(file, tokens, tokens.shape[0] - rows))

    def load(self, stored: Stored) -> Prefix | None:
        """Read all of it; None, with a warning, where it is not what was written."""
        try:
            with _opened(stored.path) as stream:
                prefix = _read(stream, stored.path)
            os.utime(stored.path)
        except (OSError, ValueError, KeyError, msgspec.MsgspecError) as error:
            name = stored.path.name
            log.warning("kept prefix %s is damaged, and is ignored: %s", name, error)
            self.entries.remove(stored)
            return None
        return prefix

    def save(self, prefix: Prefix, *, cuttable: bool) -> None:
        """Write it, if it is new and fits; a failure is a warning, and changes nothing else."""
        for held in self.entries:
            same = common_length(held.tokens, prefix.tokens) == prefix.committed
            if same and (cuttable or held.committed == prefix.committed):
                with suppress(OSError):
                    os.utime(held.path)
                return
        try:
            tensors, header = _layout(prefix, {"version": VERSION, "identity": self._identity})
            size = 8 + len(header) + sum(map(_size, tensors)) + hashlib.sha256().digest_size
            if size > min(self._budget, MAX_BYTES):
                return
            self._make_room(size)
            self._write(prefix, tensors, header)
        except (OSError, KeyError, TypeError) as error:  # a dtype or fact that no file can hold
            log.warning("a kept prefix cannot be written to %s: %r", self._path, error)
            return
        if cuttable:
            for held in self.entries[:-1]:
                if common_length(held.tokens, prefix.tokens) == held.committed:
                    self._remove(held.path)

    def _write(self, prefix: Prefix, tensors: tuple[Tensor, ...], header: bytes) -> None:
        key = self._identity.encode() + _bytes(prefix.tokens)
        file = self._path / (hashlib.sha256(key).hexdigest()[:40] + SUFFIX)
        unfinished = file.with_suffix(UNFINISHED)
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(fd, "wb") as stream:
                for part in _parts(tensors, header):
                    stream.write(part)
            unfinished.replace(file)
        finally:
            unfinished.unlink(missing_ok=True)
        self.entries.append(Stored(file, prefix.tokens, prefix.oldest))

    def _make_room(self, size: int) -> None:
        """Remove what was not used for longest, also what a writer has left that was killed."""
        files = [*self._files(), *self._path.glob(f"*{UNFINISHED}")]
        sizes = {file: file.stat().st_size for file in sorted(files, key=_used)}
        while sizes and sum(sizes.values()) + size > self._budget:
            oldest = next(iter(sizes))
            del sizes[oldest]
            self._remove(oldest)

    def _remove(self, file: Path) -> None:
        file.unlink(missing_ok=True)
        self.entries = [entry for entry in self.entries if entry.path != file]


def _used(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:  # another daemon has removed it
        return 0.0


def _opened(file: Path) -> BinaryIO:
    return os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW), "rb")


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _layout(prefix: Prefix, metadata: dict[str, str]) -> tuple[tuple[Tensor, ...], bytes]:
    """What the file holds but for its checksum, in order, and the header that says so."""
    tensors = {"tokens": prefix.tokens, "rows": prefix.rows}
    tensors |= {STATE + name: tensor for name, tensor in prefix.state.tensors.items()}
    header: dict[str, Any] = {"__metadata__": metadata | {"facts": _json(prefix.state.facts)}}
    start = 0
    for name, tensor in tensors.items():
        stop = start + _size(tensor)
        header[name] = Entry(NAMES[tensor.dtype], tuple(tensor.shape), (start, stop))
        start = stop
    length = hashlib.sha256().digest_size
    header[DIGEST] = Entry("U8", (length,), (start, start + length))
    return tuple(tensors.values()), msgspec.json.encode(header)


def _parts(tensors: tuple[Tensor, ...], header: bytes) -> Iterator[bytes]:
    """The file, piece by piece, so that no second copy of the state is made."""
    yield len(header).to_bytes(8, "little")
    yield header
    digest = hashlib.sha256(header)
    for tensor in tensors:
        for part in tensor.unbind(0) if tensor.dim() > 1 else (tensor,):
            data = _bytes(part)
            digest.update(data)
            yield data
    yield digest.digest()


def _json(facts: Any) -> str:
    return msgspec.json.encode(facts).decode()


def _header(stream: BinaryIO, file: Path) -> tuple[dict[str, str], dict[str, Entry]]:
    """Metadata and tensors; ValueError unless they fill the file exactly, one behind the other."""
    length = int.from_bytes(stream.read(8), "little")
    size = os.fstat(stream.fileno()).st_size
    if not 2 <= length <= min(MAX_HEADER, size - 8):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    raw = msgspec.json.decode(stream.read(length), type=dict[str, msgspec.Raw])
    metadata = msgspec.json.decode(raw.pop("__metadata__", b"{}"), type=dict[str, str])
    entries = {name: msgspec.json.decode(each, type=Entry) for name, each in raw.items()}
    at = 0
    for name, entry in entries.items():
        if entry.data_offsets != (at, at + entry.bytes):
            raise ValueError(f"tensor {name} lies at {entry.data_offsets}")
        at += entry.bytes
    if at != size - 8 - length or not {"tokens", "rows", DIGEST} <= entries.keys():
        raise ValueError(f"{file.name} is not whole")
    return metadata, entries


def _tensor(stream: BinaryIO, entry: Entry, digest: Any = None) -> Tensor:
    """The next tensor of the stream."""
    tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
    view = tensor.reshape(-1).view(torch.uint8).numpy().data
    if stream.readinto(view) != len(view):  # type: ignore[attr-defined]  # of a buffered reader
        raise ValueError("the file ends too soon")
    if digest is not None:
        digest.update(view)
    return tensor


def _read(stream: BinaryIO, file: Path) -> Prefix:
    metadata, entries = _header(stream, file)
    length = stream.tell() - 8
    stream.seek(8)
    digest = hashlib.sha256(stream.read(length))
    last = entries.pop(DIGEST)
    tensors = {name: _tensor(stream, entry, digest) for name, entry in entries.items()}
    if _bytes(_tensor(stream, last)) != digest.digest():
        raise ValueError("its checksum is wrong")
    state = {name.removeprefix(STATE): each for name, each in tensors.items() if STATE in name}
    facts = msgspec.json.decode(metadata["facts"].encode())
    return Prefix(tensors["tokens"], StateCopy(state, facts), tensors["rows"], NOBODY)
