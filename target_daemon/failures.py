"""What a forward raises: undone, and as typed errors."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from protocol.boundary import is_out_of_memory
from protocol.errors import DaemonError, DeviceLost, InternalError, OutOfMemory
from target_daemon.sequences import Sequence
from target_daemon.target import DFlashTarget

log = logging.getLogger(__name__)

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
        if is_out_of_memory(error):
            raise OutOfMemory(f"no memory for a {what}") from error
        log.exception("%s failed", what)
        if DEVICE_MARK in str(error).lower():
            raise DeviceLost(f"the GPU failed in a {what}; the daemon's log says why") from error
        raise InternalError(f"a {what} failed; the daemon's log says why") from error


@contextmanager
def undone_on_failure(
    target: DFlashTarget, sequence: Sequence, rows: int
) -> Iterator[Callable[[], None]]:
    """Return to the present state if the body raises, and raise typed errors only.

    Yields the function that returns to the present state.
    """
    slot, base = sequence.slot, sequence.committed
    sequence.before = None
    with typed_failures(f"forward of {rows} rows at position {base}"), ExitStack() as undo:
        snapshot = target.snapshot_kv(slot, base, rows)

        def restore() -> None:
            sequence.lost = True  # until the next line has succeeded
            target.restore_kv(slot, snapshot)
            sequence.lost = False

        undo.callback(restore)
        yield restore
        undo.pop_all()
        if not target.supports_cut:  # its end may be found to lie within these rows
            sequence.before = base, snapshot
