"""Kept prefixes on disk: one safetensors file each, of one model, whole or not used at all.

A file's name is a digest of what it is for. It holds the ids, the feature rows and the state; its
metadata the format's version and the `identity` of the model and of how it computes; its last
tensor the SHA-256 of all before it. What is damaged is removed with a warning, what belongs to
another model is left alone. Files that were not used for longest are removed to stay in the budget.
"""

import hashlib
import logging
import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import msgspec
import torch
from torch import Tensor

from protocol.errors import ConfigError, PermissionRefused
from protocol.run_directory import is_private
from target_daemon.prefix_file import (
    VERSION,
    layout,
    opened,
    parts,
    raw,
    read_header,
    read_prefix,
    read_tensor,
    size_of,
)
from target_daemon.prefixes import NOBODY, Prefix, common_length

log = logging.getLogger(__name__)

NAME: Final = re.compile(r"[0-9a-f]{40}")  # all but the suffix; other files are not ours
SUFFIX: Final = ".safetensors"
UNFINISHED: Final = ".unfinished"
DAMAGED: Final = ".damaged"  # found so in use: the next start tells it and removes it
MAX_FILES: Final = 4096
MAX_BYTES: Final = 2 << 30  # of one file: it is read and written between two messages
BAD: Final = (OSError, ValueError, KeyError, msgspec.MsgspecError)


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
        self.damaged = 0  # files at the start
        self._told = False  # that one does not fit
        self.entries: list[Stored] = []

    @classmethod
    def open(cls, path: Path, identity: str, budget: int) -> Self:
        """Make the folder, or read what is there.

        ConfigError where it cannot be made, PermissionRefused where others could look into it.
        """
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the prefix store {path}: {error.strerror}") from error
        if not is_private(path):
            raise PermissionRefused(
                f"the prefix store {path} is not this user's alone (mode 0700): {_found(path)}"
            )
        folder = cls(path, identity, budget)
        folder._make_room(0)
        for file in folder._files(DAMAGED):
            folder.damaged += 1
            folder._remove(file)
        for file in folder._files()[-MAX_FILES:]:
            try:
                folder._read_entry(file)
            except BAD as error:
                folder._refuse(file, error)
        return folder

    @property
    def warning(self) -> str:
        """One sentence of what could not be used at the start, or nothing."""
        if not self.damaged:
            return ""
        return f"damaged files of the prefix store {self._path}, which are not used: {self.damaged}"

    def _refuse(self, file: Path, error: Exception) -> None:
        """Warn; what is wrong inside stays wrong: it goes. What cannot be read may be, later."""
        log.warning("kept prefix %s is damaged, and is ignored: %s", file.name, error)
        self.damaged += 1
        if not isinstance(error, OSError):
            self._remove(file)

    def _files(self, *suffixes: str) -> list[Path]:
        """Ours, the least recently used first."""
        wanted = suffixes or (SUFFIX,)
        found = [
            file
            for file in self._path.iterdir()
            if file.suffix in wanted and NAME.fullmatch(file.stem)
        ]
        return sorted(found, key=_used)

    def _read_entry(self, file: Path) -> None:
        with opened(file) as stream:
            metadata, entries = read_header(stream, file)
            if (metadata.get("version"), metadata.get("identity")) != (VERSION, self._identity):
                return  # another model's, or of another time
            tokens = read_tensor(stream, entries["tokens"])
            rows = entries["rows"].shape[0]
        if tokens.dtype != torch.int64 or tokens.dim() != 1 or not rows <= tokens.shape[0]:
            raise ValueError("ids and rows do not fit")
        self.entries.append(Stored(file, tokens, tokens.shape[0] - rows))

    def load(self, stored: Stored) -> Prefix | None:
        """Read all of it; None, with a warning, where it is not what was written."""
        try:
            with opened(stored.path) as stream:
                prefix = read_prefix(stream, stored.path)
            os.utime(stored.path)
        except BAD as error:
            name = stored.path.name
            log.warning("kept prefix %s is damaged, and is ignored: %s", name, error)
            self.entries.remove(stored)
            if not isinstance(error, OSError):
                with suppress(OSError):
                    stored.path.replace(stored.path.with_suffix(DAMAGED))
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
            tensors, header = layout(prefix, {"version": VERSION, "identity": self._identity})
            size = 8 + len(header) + sum(map(size_of, tensors)) + hashlib.sha256().digest_size
            if size > (most := min(self._budget, MAX_BYTES)):
                self._tell_size(size, most)
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

    def _tell_size(self, size: int, most: int) -> None:
        if not self._told:
            log.info("a kept prefix of %d bytes is not written: a file has at most %d", size, most)
        self._told = True

    def _write(self, prefix: Prefix, tensors: tuple[Tensor, ...], header: bytes) -> None:
        key = self._identity.encode() + raw(prefix.tokens)
        file = self._path / (hashlib.sha256(key).hexdigest()[:40] + SUFFIX)
        unfinished = file.with_suffix(UNFINISHED)
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(fd, "wb") as stream:
                for part in parts(tensors, header):
                    stream.write(part)
            unfinished.replace(file)
        finally:
            unfinished.unlink(missing_ok=True)
        self.entries.append(Stored(file, prefix.tokens, prefix.oldest))

    def _make_room(self, size: int) -> None:
        """Remove what was not used for longest, also what a writer has left that was killed."""
        sizes = {file: _length(file) for file in self._files(SUFFIX, UNFINISHED, DAMAGED)}
        while sizes and sum(sizes.values()) + size > self._budget:
            oldest = next(iter(sizes))
            del sizes[oldest]
            self._remove(oldest)

    def _remove(self, file: Path) -> None:
        with suppress(OSError):  # a file system that is read only, or a folder of such a name
            file.unlink()
        self.entries = [entry for entry in self.entries if entry.path != file]


def _used(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:  # another daemon has removed it
        return 0.0


def _length(file: Path) -> int:
    try:
        return file.lstat().st_size
    except OSError:  # another daemon has removed it
        return 0


def _found(path: Path) -> str:
    """What stands against a folder, in words."""
    facts = path.lstat()
    kind = "a symbolic link" if stat.S_ISLNK(facts.st_mode) else "a folder"
    return f"it is {kind} of user {facts.st_uid} with mode {stat.S_IMODE(facts.st_mode):04o}"
