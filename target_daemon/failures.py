"""What a forward raises, as typed errors."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from protocol.errors import DaemonError, InternalError, OutOfMemory

log = logging.getLogger(__name__)

# How torch words a failed allocation on the CPU ("DefaultCPUAllocator: can't allocate memory")
# and on a GPU; on the CPU it is a plain RuntimeError.
ALLOCATION_MARKS: Final = ("can't allocate memory", "not enough memory", "out of memory")


@contextmanager
def typed_failures(what: str) -> Iterator[None]:
    """Turn a failed allocation into OutOfMemory, other errors of torch into InternalError.

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
        raise InternalError(f"a {what} failed; the daemon's log says why") from error
