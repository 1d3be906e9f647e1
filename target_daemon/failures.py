"""What a forward raises, as typed errors."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from protocol.errors import DaemonError, DeviceLost, InternalError, OutOfMemory

log = logging.getLogger(__name__)

# How torch words a failed allocation on the CPU ("DefaultCPUAllocator: can't allocate memory")
# and on a GPU; on the CPU it is a plain RuntimeError.
ALLOCATION_MARKS: Final = ("can't allocate memory", "not enough memory", "out of memory")
DEVICE_MARK: Final = "cuda error"  # as torch words what stays with the process's context


@contextmanager
def typed_failures(what: str) -> Iterator[None]:
    """Type what torch raises: OutOfMemory, DeviceLost for errors of CUDA, else InternalError.

    `what` names the work ("forward of 8 rows at position 40"); it reaches the client, while the
    foreign error's own words, which may hold addresses, go to the log alone.
    """
    try:
        yield
    except DaemonError:
        raise
    except (MemoryError, RuntimeError) as error:
        text = str(error).lower()
        if isinstance(error, MemoryError) or any(mark in text for mark in ALLOCATION_MARKS):
            raise OutOfMemory(f"no memory for a {what}") from error
        log.exception("%s failed", what)
        if DEVICE_MARK in text:
            raise DeviceLost(f"the GPU failed in a {what}; the daemon's log says why") from error
        raise InternalError(f"a {what} failed; the daemon's log says why") from error
