"""How long a daemon may take: learned from real rounds by what was asked. Pure.

Two deadlines for the draft. The soft one is ``max(soft_least, 4 * p95)``: the round goes on without
it. The hard one is ``20 * p95``, at least `hard_least` and at most the verb's own limit: it hangs,
and is started again. Nothing can go on without the target, so that it has no soft deadline, and a
more patient hard one: ``40 * p95``, at least `target_least`, for rounds and chunks of the prompt.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Final, TypeAlias

from launch.events import Role
from launch.peer import Listed
from launch.token_ids import WIDTH
from protocol.config import Deadlines
from protocol.messages import (
    Close,
    Ingest,
    IngestItem,
    Prefill,
    PrefillItem,
    Propose,
    ProposeItem,
    Verify,
    VerifyItem,
)

SOFT_FACTOR: Final = 4.0
HARD_FACTOR: Final = 20.0
TARGET_FACTOR: Final = 40.0
QUANTILE: Final = 0.95
ENOUGH: Final = 16  # measured times, before they count for more than the seed
KEPT: Final = 64
PIECE: Final = 256  # rows that an ingest of the first estimate had

TIMED: Final = (Verify, Prefill)  # of the target
TAKES_IN: Final = (Propose, Ingest)

Work: TypeAlias = tuple[type[Listed], int, int]  # the classes of width and rows are powers of two


@dataclass(frozen=True, slots=True)
class Allowance:
    """Seconds from asking; `soft` is None where nothing can go on without the answer."""

    soft: float | None
    hard: float


class Patience:
    """Times of both daemons; a new life may be as fast as the old one, so they are kept."""

    def __init__(self, limits: Deadlines) -> None:
        self._limits = limits
        self._seed = 0.0
        self._times: dict[Work, deque[float]] = {}
        self._p95: dict[Work, float] = {}
        self._taken_in: dict[int, int] = {}  # by sequence: rows below this position

    def seed(self, seconds: float) -> None:
        """How long a first block and one piece of ingest took, everything included."""
        self._seed = seconds

    def allow(self, role: Role, message: Listed) -> Allowance:
        """How long `message` may take."""
        limit = float(getattr(self._limits, type(message).__name__.lower()))
        p95 = self._p95.get(self._work(message))
        if role == "target":
            least = limit if p95 is None else max(self._limits.target_least, TARGET_FACTOR * p95)
            return Allowance(None, min(limit, least))
        if p95 is None:
            seed = self._seed * max(1.0, self._rows(message) / PIECE)
            soft, hard = self._limits.soft_seed, HARD_FACTOR * seed
        else:
            soft, hard = max(self._limits.soft_least, SOFT_FACTOR * p95), HARD_FACTOR * p95
        hard = min(limit, max(self._limits.hard_least, hard))
        return Allowance(min(soft, hard), hard)

    def note(self, role: Role, message: Listed, seconds: float) -> None:
        """It was answered, in time or late."""
        if isinstance(message, Close):  # the last that is answered of a sequence
            for closed in message.items:
                self._taken_in.pop(closed.sequence, None)
        if role == "target" and not isinstance(message, TIMED):
            return  # as long as what is replayed, or over in a moment
        work = self._work(message)
        times = self._times.setdefault(work, deque(maxlen=KEPT))
        times.append(seconds)
        if len(times) >= ENOUGH:
            ordered = sorted(times)
            self._p95[work] = ordered[math.ceil(QUANTILE * len(ordered)) - 1]
        if isinstance(message, TAKES_IN):
            for item in message.items:
                self._taken_in[item.sequence] = _stop(item)

    def forget_all(self) -> None:
        """The draft of this life is gone, with all that it had taken in."""
        self._taken_in.clear()

    def _work(self, message: Listed) -> Work:
        if isinstance(message, TIMED):
            width = sum(len(item.tokens) for item in message.items) // WIDTH
            rows = sum(_behind(item) for item in message.items)
            return type(message), width.bit_length(), rows.bit_length()
        width = sum(item.width for item in message.items) if isinstance(message, Propose) else 0
        return type(message), width.bit_length(), self._rows(message).bit_length()

    def _rows(self, message: Listed) -> int:
        """Rows to take in."""
        if not isinstance(message, TAKES_IN):
            return 0
        return sum(
            max(0, _stop(item) - self._taken_in.get(item.sequence, 0)) for item in message.items
        )


def _behind(item: VerifyItem | PrefillItem) -> int:
    """Positions that its rows attend to."""
    return item.base_pos if isinstance(item, VerifyItem) else item.start


def _stop(item: ProposeItem | IngestItem) -> int:
    return item.base_pos if isinstance(item, ProposeItem) else item.stop
