"""What the parts of a round cost: seconds by rows and context, learned from real rounds. Pure."""

from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Final

from launch.events import Role
from launch.policy import Outcome

MOST_GROWTH: Final = 2.0  # twice the context costs no more; what does is no matter of context
BUCKET: Final = 256  # positions of the first context bucket; each one after it is twice as wide
# What a new time counts for, once a few are known: hiccups only ever lengthen one, so that a longer
# one says less of the price.
FALL: Final = 1 / 3
RISE: Final = 1 / 10
HALF: Final = 1 / 2  # of one that is longer than what is old: as much as all that was known
FEW: Final = 3  # times, after which one that stands out is left out
USUAL: Final = 2  # feature rows that a usual round of a draft that pays takes in
USUAL_ROWS: Final = 64  # ingested at once; more make good a gap, and are no part of a usual round
OUTLIER: Final = 3.0  # the factor that stands out
LEAST: Final = 1e-9  # seconds of a forward: what a daemon's clock may not see is no price of 0
OLD: Final = 48  # forwards since, after which a time is replaced by a new one


@dataclass(slots=True)
class Cell:
    """Times, decayed: what a forward takes where little is in its way."""

    seconds: float
    count: int = 1
    stands_out: bool = False  # the last time was far off
    noted: int = 0  # forwards of any rows before the last time

    def note(self, seconds: float, now: int = 0) -> None:
        """One hiccup of the machine must not look like a price; two in a row are a new price.

        `now`: forwards of any rows so far. Machines become slower and faster, so that what is old
        is worth no more than one new time, and nothing where that is shorter.
        """
        is_old = now - self.noted > OLD
        if is_old:
            self.count = int(seconds > self.seconds)
        self.noted = now
        again, self.count = self.stands_out, self.count + 1
        low, high = self.seconds / OUTLIER, self.seconds * OUTLIER
        self.stands_out = self.count > FEW and not low <= seconds <= high
        if self.stands_out and again:
            self.seconds, self.count, self.stands_out = seconds, 1, False
        elif not self.stands_out:
            self.seconds += (seconds - self.seconds) * self._share(seconds, is_old=is_old)

    def _share(self, seconds: float, *, is_old: bool) -> float:
        """What this time counts for: of few times the least is believed, unless they are old."""
        if seconds > self.seconds:
            return HALF if is_old else RISE
        return FALL if self.count > FEW else 1.0


def bucket_of(position: int) -> int:
    """The class of context length: 0 below 256 positions, 1 below 512, 2 below 1024, ..."""
    return (position // BUCKET).bit_length()


class CostCurve:
    """Seconds of one kind of forward, by its rows and the context before it.

    Rows that were never run are interpolated between neighbours. A context bucket starts as the one
    before it and is then scaled by what was seen in it. More rows cost no less (`rising`).
    """

    def __init__(self) -> None:
        self._now = 0  # forwards that were noted
        self._cells: dict[int, dict[int, Cell]] = {}
        self._points: dict[int, list[tuple[int, float]]] = {}  # derived, by bucket

    @property
    def cells(self) -> list[tuple[int, int, float, int]]:
        """All that is known: bucket, rows, seconds, and how many times that counts for."""
        return [
            (bucket, rows, max(cell.seconds, LEAST), cell.count)
            for bucket, cells in self._cells.items()
            for rows, cell in cells.items()
        ]

    def restore(self, cells: Iterable[tuple[int, int, float, int]]) -> None:
        """Begin with what an earlier process knew: old, however many times it is of."""
        for bucket, rows, seconds, _ in cells:
            cell = Cell(seconds, noted=-OLD - 1)
            self._cells.setdefault(bucket, {})[rows] = cell
        self._points.clear()

    @property
    def known_rows(self) -> frozenset[int]:
        """Rows that were run in any context."""
        return frozenset(rows for cells in self._cells.values() for rows in cells)

    def note(self, rows: int, position: int, seconds: float) -> None:
        """A forward of `rows` behind `position` rows of context took so long."""
        self._now += 1
        cells = self._cells.setdefault(bucket_of(position), {})
        if rows in cells:
            cells[rows].note(seconds, self._now)
        else:
            cells[rows] = Cell(seconds, noted=self._now)
        self._points.clear()

    def is_old(self, rows: int, position: int) -> bool:
        """Whether forwards of so many rows were run there, or else elsewhere, and not of late."""
        here = self._cells.get(bucket_of(position), {})
        known = [here] if rows in here else self._cells.values()
        noted = [cells[rows].noted for cells in known if rows in cells]
        return bool(noted) and self._now - max(noted) > OLD

    def upto(self, rows: int, position: int) -> list[float]:
        """What forwards of 1, 2, ... `rows` cost there; empty while nothing is known."""
        bucket = bucket_of(position)
        if bucket not in self._points:
            self._points[bucket] = self._curve(bucket)
        points = self._points[bucket]
        if not points:
            return []
        found: list[float] = []
        low, before = points[0]
        for high, after in points:
            slope = (after - before) / (high - low) if high > low else 0.0
            found += [after - slope * (high - at) for at in range(len(found) + 1, high + 1)]
            if len(found) >= rows:
                return found[:rows]
            low, before = high, after
        return found + [before] * (rows - len(found))

    def _curve(self, bucket: int) -> list[tuple[int, float]]:
        buckets = sorted(number for number, cells in self._cells.items() if cells)
        found: dict[int, tuple[int, float]] = {}
        for number in buckets:
            if number > bucket and found:
                break
            own = {rows: (cell.noted, cell.seconds) for rows, cell in self._cells[number].items()}
            both = [(own[rows][1], found[rows][1]) for rows in own if rows in found]
            common = [after / before for after, before in both if before]
            growth = sum(common) / len(common) if common else 1.0
            growth = min(max(growth, 1 / MOST_GROWTH), MOST_GROWTH)
            found = {rows: (noted, time * growth) for rows, (noted, time) in found.items()} | own
        return rising(found)


def rising(times: Mapping[int, tuple[int, float]]) -> list[tuple[int, float]]:
    """Rows and seconds, by rows, of what is known of rows: when it was noted, and seconds.

    More rows cost no less. Where two times say so, the machine has changed between them, and the
    older one is bounded by the newer.
    """
    points = [(rows, max(seconds, LEAST)) for rows, (_, seconds) in sorted(times.items())]
    if all(less <= more for (_, less), (_, more) in pairwise(points)):
        return points  # as mostly
    points = []
    newest = sorted(times, key=lambda rows: (times[rows][0], rows), reverse=True)
    for rows in newest:
        at = bisect(points, (rows,))
        low = points[at - 1][1] if at else LEAST
        high = points[at][1] if at < len(points) else inf
        points.insert(at, (rows, min(max(times[rows][1], low), high)))
    return points


@dataclass(slots=True)
class Costs:
    """Of one pair of daemons, over all requests."""

    verify: CostCurve = field(default_factory=CostCurve)  # rows of the block
    draft: CostCurve = field(default_factory=CostCurve)  # rows of the block
    ingest: CostCurve = field(default_factory=CostCurve)  # feature rows
    _hand_over: dict[Role, Cell] = field(default_factory=dict)  # by role

    def note(self, outcome: Outcome) -> None:
        """A round is over: take in what its parts took."""
        position = outcome.position
        self.verify.note(outcome.rows, position, outcome.verify_seconds)
        if not outcome.offered:
            return
        self.draft.note(len(outcome.offered) + 1, position, outcome.draft_seconds)
        if 0 < outcome.ingested <= USUAL_ROWS:
            self.ingest.note(outcome.ingested, position, outcome.ingest_seconds)

    def note_hand_over(self, role: Role, seconds: float) -> None:
        """A question and its answer took so much longer than the engine's own time."""
        if role in self._hand_over:
            self._hand_over[role].note(max(0.0, seconds))
        else:
            self._hand_over[role] = Cell(max(0.0, seconds))

    @property
    def hand_overs(self) -> dict[Role, float]:
        """All that are known, by role."""
        return {role: cell.seconds for role, cell in self._hand_over.items()}

    def hand_over(self, role: Role) -> float:
        """Seconds between two engines that are no engine's; 0 while unknown."""
        cell = self._hand_over.get(role)
        return 0.0 if cell is None else cell.seconds

    def asking(self, widest: int, position: int) -> list[float]:
        """Seconds that a round pays for 1, 2, ... `widest` proposed rows, whatever it verifies.

        The draft's block, the feature rows of a usual round, and a second hand-over; 0 for one row,
        which asks no draft.
        """
        block = self.draft.upto(widest, position) or [0.0] * widest
        ingest = self.ingest.upto(USUAL, position) or [0.0]
        fixed = ingest[-1] + self.hand_over("draft")
        return [0.0, *(seconds + fixed for seconds in block[1:])]

    def alone(self, widest: int, position: int) -> list[float]:
        """Seconds of rounds of 1, 2, ... `widest` rows without a draft; empty while unknown."""
        hand_over = self.hand_over("target")
        return [seconds + hand_over for seconds in self.verify.upto(widest, position)]

    def trees(self, chain: int, tokens: Sequence[float], position: int) -> list[float]:
        """Seconds of rounds of `chain`, `chain` + 1, ... rows that emit so many `tokens`.

        `tokens` are for 1, 2, ... rows. The draft's block is the chain's, whatever stands beside
        it. Empty while unknown.
        """
        widest = len(tokens)
        verify = self.verify.upto(widest, position)
        if not verify:
            return []
        block = self.draft.upto(chain, position) or [0.0]
        ingest = self.ingest.upto(widest, position) or [0.0] * widest
        fixed = block[-1] + self.hand_over("target") + self.hand_over("draft")
        return [
            fixed + verify[rows - 1] + ingest[round(tokens[rows - 1]) - 1]
            for rows in range(chain, widest + 1)
        ]
