"""Locks on files (flock): the kernel frees them when the holder dies, however that comes."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


@contextmanager
def taken(path: Path, *, create: bool = False) -> Iterator[bool]:
    """Hold `path`'s lock exclusively; yields False when someone else does, or it is not there."""
    with ExitStack() as stack:
        try:
            fd = stack.enter_context(held(path, create=create))
        except OSError:
            fd = None
        yield fd is not None


@contextmanager
def held(path: Path, *, create: bool = False) -> Iterator[int | None]:
    """Hold `path`'s lock exclusively; yields None when someone else does. OSError as it arises.

    What is yielded is its descriptor: a process that inherits it holds the lock as well.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    fd = os.open(path, flags, 0o600)
    try:
        yield fd if lock(fd, fcntl.LOCK_EX) and still_there(path, fd) else None
    finally:
        os.close(fd)


def lock(fd: int, kind: int) -> bool:
    """Take ``fcntl.LOCK_EX`` or ``fcntl.LOCK_SH`` without waiting; False when it is held."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def still_there(path: Path, fd: int) -> bool:
    """Whether `path` is the open file: it may have been removed before its lock was taken."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(fd))
    except FileNotFoundError:
        return False
