"""What becomes of an exception in a daemon: an answer, and for a defect a log entry."""

import logging
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from protocol.errors import DaemonError, FeatureExpired, InternalError, OutOfMemory
from protocol.messages import Failed, Item, ItemFailed, LinkMessage

MAX_DETAIL: Final = 4096
# How torch words a failed allocation on the CPU ("DefaultCPUAllocator: can't allocate memory"), in
# its kernels (oneDNN, the C++ library) and on a GPU; it is a plain RuntimeError.
ALLOCATION_MARKS: Final = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "could not create a memory",
)

Request = TypeVar("Request", bound=LinkMessage)
I = TypeVar("I", bound=Item)  # noqa: E741 -- an item, beside its result R
R = TypeVar("R", bound=Item)

log = logging.getLogger(__name__)


def answer(handle: Callable[[Request], LinkMessage], message: Request) -> LinkMessage:
    """What `handle` returns, or a Failed that repeats the message's lives."""
    try:
        return handle(message)
    except Exception as error:  # noqa: BLE001 -- the daemon's one boundary, with `each`
        return failed(message, typed(error, type(message).__name__))


def each(items: Iterable[I], call: Callable[[I], R]) -> tuple[R | ItemFailed, ...]:
    """Call for each sequence; one that fails answers ItemFailed, and the others go on.

    Any exception is caught here: letting it pass would lose what earlier items have committed.
    """
    return tuple(_one(item, call) for item in items)


def _one(item: I, call: Callable[[I], R]) -> R | ItemFailed:
    try:
        return call(item)
    except Exception as error:  # noqa: BLE001 -- see `each`
        ours = typed(error, f"{type(item).__name__} of sequence {item.sequence}")
        return ItemFailed(
            sequence=item.sequence,
            round=item.round,
            code=ours.code,
            detail=str(ours)[:MAX_DETAIL],
        )


def typed(error: Exception, doing: str) -> DaemonError:
    """The error to report; a defect is logged with its traceback, and reported without its text."""
    if isinstance(error, DaemonError):
        # Rows of a request that has ended are no fault: a draft that is late may ask for some.
        level = logging.DEBUG if isinstance(error, FeatureExpired) else logging.INFO
        log.log(level, "%s refused: %s: %s", doing, error.code, error)
        return error
    log.error("%s failed", doing, exc_info=error)
    if is_out_of_memory(error):
        return OutOfMemory(f"{doing}: an allocation failed")
    return InternalError(f"{doing} failed; the daemon's log says why")


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed, here or on a GPU."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(mark in text for mark in ALLOCATION_MARKS)


def failed(message: LinkMessage, error: DaemonError) -> Failed:
    """The refusal of a whole message."""
    return Failed(
        target_life=message.target_life,
        draft_life=message.draft_life,
        code=error.code,
        detail=str(error)[:MAX_DETAIL],
    )
