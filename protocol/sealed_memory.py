"""Anonymous memory that one process writes and others can only read: memfd, seals, mappings.

The owner maps the descriptor read-write once and then seals it: its size is fixed for good (a
reader can never be hit by SIGBUS), and nobody, not even by reopening ``/proc/self/fd/N``, gets
another writable mapping. The owner's own mapping stays writable.
"""

import fcntl
import mmap
import os
from typing import Final

from protocol.errors import InsufficientMemory, TransportRefused, map_exceptions

F_SEAL_FUTURE_WRITE: Final = 0x10  # Linux 5.1; not in the fcntl module of Python 3.11
SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE
MAX_BYTES: Final = 1 << 44


def create(name: str, size: int) -> tuple[int, mmap.mmap]:
    """Return the descriptor and the only writable mapping of `size` zero bytes.

    Pages take memory when they are first touched. `name` is what ``/proc`` shows.
    """
    if not 0 < size <= MAX_BYTES:
        raise InsufficientMemory(f"shared memory of {size} bytes; at most {MAX_BYTES} can be had")
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with map_exceptions({OSError: TransportRefused}):
            os.ftruncate(fd, size)
            mapping = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd, mapping


def open_sealed(fd: int, size: int) -> mmap.mmap:
    """Map a descriptor that somebody sent, read-only, after checking that it is what it should be.

    Raises TransportRefused when it is not memory with all of SEALS, or not of exactly `size` bytes.
    The descriptor stays the caller's.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise TransportRefused("the descriptor from the target is no sealed memory") from error
    if seals & SEALS != SEALS:
        raise TransportRefused(f"the target's memory has seals {seals:#x}, not {SEALS:#x}")
    found = os.fstat(fd).st_size
    if found != size or size == 0:
        raise TransportRefused(f"the target announced {size} bytes of memory and sent {found}")
    with map_exceptions({OSError: TransportRefused}):
        return mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
