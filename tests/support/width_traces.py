"""Traces that a width policy is played on: what every width would emit anywhere, and its cost.

A trace states, for every position of every text, how many of the draft's proposals there are
right and how likely the draft found each to be, so that any sequence of widths can be played on it
exactly; and seconds by width.
"""

import itertools
import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path

from launch.auto_width import Experience
from launch.policy import AUTO, Choice, Outcome, Situation

FOLDER = Path(__file__).parents[1] / "data" / "width_traces"


@dataclass(frozen=True)
class Prices:
    """Seconds; lists are by rows, from one row on."""

    verify: tuple[float, ...]
    draft: tuple[float, ...]
    ingest_row: float  # of one feature row
    hand_over: float = 0.0
    ingest_more: float = 1.0  # of each further row of the same ingest, in parts of the first's

    def round(self, width: int, propose: int, ingested: int) -> tuple[float, float, float, float]:
        """Verify, draft, ingest and hand-over of one round."""
        verify = self.verify[width - 1]
        if propose == 1:
            return verify, 0.0, 0.0, self.hand_over
        ingest = self.ingest_row * (1 + (ingested - 1) * self.ingest_more) if ingested else 0.0
        return verify, self.draft[propose - 1], ingest, 2 * self.hand_over


@dataclass(frozen=True)
class Trace:
    """`right[t][p]`: of a whole block proposed after token `p` of text `t`, how many are right.

    `stated[t][p]`: how likely the draft finds each slot of it to be; empty: it states nothing.
    """

    name: str
    block_size: int
    prices: Prices
    right: tuple[tuple[int, ...], ...]
    stated: tuple[tuple[tuple[float, ...], ...], ...] = ()

    def only(self, *texts: int) -> "Trace":
        """Some of the texts."""
        right, stated = ([part[text] for text in texts] for part in (self.right, self.stated))
        return replace(self, right=tuple(right), stated=tuple(stated))

    def behind(self, start: int, *texts: int) -> "Trace":
        """One text, made of `texts` one behind the other, the first from position `start` on."""

        def joined(part):
            return (tuple(itertools.chain.from_iterable(part[one] for one in texts))[start:],)

        stated = joined(self.stated) if self.stated else ()
        return replace(self, right=joined(self.right), stated=stated)


@dataclass
class Played:
    """What a policy did on a trace."""

    seconds: float = 0.0
    rounds: list[tuple[int, int, float]] = field(default_factory=list)  # position, width, seconds
    asked: list[int] = field(default_factory=list)  # positions at which the draft proposed


def play(
    trace, block_width=AUTO, *, noise=0.0, seed=0, experience=None, prices=None, says=None
) -> Played:
    """Decode all texts of `trace`, one request after the other, with one policy each.

    `says(right, slot, source)`, in place of what the trace states: how sure the draft is of a slot
    of a block with so many right.
    """
    played, source, saying = Played(), random.Random(seed), random.Random(seed)
    experience = experience or Experience()
    experience.costs.note_hand_over("target", trace.prices.hand_over)
    experience.costs.note_hand_over("draft", trace.prices.hand_over)
    done = 0
    for text, right in enumerate(trace.right):
        policy, at, known = experience.policy(block_width), 0, 0
        while at < len(right):
            choice = policy.choose(Situation(trace.block_size, len(right) - at, at))
            slots = choice.propose - 1
            sure = trace.stated[text][at][:slots] if trace.stated else ()
            if says:
                sure = tuple(says(right[at], slot, saying) for slot in range(slots))
            choice = Choice(choice.propose, policy.cut(choice, sure))
            costs = (prices(done + at) if prices else trace.prices).round(
                choice.verify, choice.propose, at - known
            )
            jitter = [cost * (1 + noise * source.uniform(-1, 1)) for cost in costs]
            outcome = _outcome(right, at, choice, jitter, at - known, sure)
            if choice.propose > 1:
                known = at
                played.asked.append(done + at)
            policy.note(outcome)
            played.seconds += sum(jitter)
            played.rounds.append((done + at, choice.verify, sum(jitter)))
            at += len(outcome.tokens)
        done += len(right)
    return played


def seconds_from(trace, width, start, end, rounds=None) -> tuple[float, int]:
    """Seconds of a fixed width from position `start` of the only text on, and how far that came."""
    (right,), seconds, at, left = trace.right, 0.0, start, rounds
    while at < end and left != 0:
        rows = min(width, end - at)
        accepted = min(right[at], rows - 1)
        seconds += sum(trace.prices.round(rows, rows, accepted + 1))
        at, left = at + accepted + 1, None if left is None else left - 1
    return seconds, at


def _outcome(right, at, choice, costs, ingested, sure=()):
    """Token `p` of a text is `p` itself; a wrong proposal is -1."""
    rows = choice.verify
    offered = [at + 1 + i if i < right[at] else -1 for i in range(choice.propose - 1)]
    accepted = min(right[at], rows - 1)
    verify, draft, ingest, _ = costs
    return Outcome(
        position=at,
        rows=rows,
        offered=tuple(offered),
        drafted=rows - 1,
        tokens=tuple(range(at + 1, at + accepted + 2)),
        draft_seconds=draft,
        ingest_seconds=ingest,
        ingested=ingested if choice.propose > 1 else 0,
        verify_seconds=verify,
        confidences=sure,
    )


def made_text(rates, block_size, seed):
    """A text whose draft is right with P `rates[p]` for token `p`, independently.

    As in a real trace, whether a token can be guessed is the token's property: neighbours' blocks
    agree about it.
    """
    source = random.Random(seed)
    easy = [source.random() < rate for rate in rates]
    found = []
    for p in range(len(easy)):
        run = itertools.takewhile(bool, easy[p + 1 : p + block_size])
        found.append(sum(1 for _ in run))
    return tuple(found)


def made(name, block_size, prices, *texts) -> Trace:
    """A trace of such texts, each given by its `rates`, whose draft knows them and no more."""
    right = tuple(made_text(rates, block_size, seed) for seed, rates in enumerate(texts))
    stated = tuple(
        tuple(
            (*rates[p + 1 : p + block_size], *[0.0] * block_size)[: block_size - 1] for p in places
        )
        for rates, places in ((rates, range(len(rates))) for rates in texts)
    )
    return Trace(name, block_size, prices, right, stated)


def recorded():
    """The recorded traces, by name; each states how its two parts were made."""
    return [_read(path) for path in sorted(FOLDER.glob("*.json"))]


def _read(path) -> Trace:
    raw = json.loads(path.read_text())
    prices = Prices(
        **{
            key: tuple(value) if isinstance(value, list) else value
            for key, value in raw["prices"].items()
        }
    )
    stated = tuple(
        tuple(tuple(percent / 100 for percent in block) for block in text) for text in raw["stated"]
    )
    return Trace(raw["name"], raw["block_size"], prices, tuple(map(tuple, raw["right"])), stated)
