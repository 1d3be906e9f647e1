"""The widths that emit the most tokens a second, learned while decoding. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import ClassVar, Final

from launch.acceptance import Acceptance
from launch.confidence import Confidence, Confidences, observed
from launch.costs import Costs
from launch.events import Role
from launch.lookups import Rates, unknown
from launch.policy import ALONE, AUTO, Choice, FixedWidth, Outcome, Situation, WidthPolicy
from launch.probes import RAREST, Probes
from launch.shapes import Gain, Manner, shape_for
from launch.tree import Ranks
from launch.worth import Prices, Worth, emitted, weighed, worthwhile
from protocol.messages import (
    DEFAULT_TREE_BUDGET,
    Message,
    Proposed,
    ProposedItem,
    TreeVerify,
    Verdict,
    Verified,
)

MARGIN: Final = 1.03  # the draft must promise so much more than a step: what it states varies
CHANCE: Final = 1.1  # n-grams must promise so much more: the best of many rates flatters
# Rows that are asked for at least. Slots see each other: of a block of 2, 3, 4 and 8 rows of the
# installed draft the first was right at 0.375, 0.410, 0.422 and 0.424 of 1,902 places.
LEAST: Final = 4
STALE: Final = 0.3  # what is known before a probe counts for
STEP: Final = 48  # rounds, after which a step is timed where guesses took its place
# Rounds to the next probe, where the block of one would have paid and those before it not:
PROMISING: Final = 4
SURPRISING: Final = 1  # where a draft that states nothing was right at last
RARE: Final = 0.2  # a draft whose first slot is right less often is not expected to be
OLD: Final = 2.0  # rounds that all outcomes count for when it is right all the same
FRESH: Final = 6.0  # rounds, of which what is known since then is at most
OTHER_TEXT: Final = 6.0  # the same for outcomes of earlier requests


@dataclass(slots=True)
class Experience:
    """What is known of one pair of daemons, whoever's request it came from."""

    costs: Costs = field(default_factory=Costs)
    acceptance: Acceptance = field(default_factory=Acceptance)  # of a draft that states nothing
    confidence: Confidences = field(default_factory=Confidences)
    worth: Worth = field(default_factory=Worth)  # as the last request left it
    probes: Probes = field(default_factory=Probes)  # the same
    ranks: Ranks = field(default_factory=Ranks)
    trees: Gain = field(default_factory=Gain)
    lookups: Rates = field(default_factory=unknown)  # of n-grams

    def policy(
        self, block_width: int, verify: TreeVerify = "chain", temperature: float = 0.0
    ) -> WidthPolicy:
        """The policy of a new request: `block_width` rows, or AUTO."""
        if block_width != AUTO:
            return FixedWidth(block_width)
        gain = self.trees if verify == "auto" else Gain()
        confidence = self.confidence.at(temperature)
        return AutoWidth(self, confidence, gain, cuts=verify == "chain")

    def manner(
        self,
        block_width: int,
        verify: TreeVerify = "chain",
        nodes: int = DEFAULT_TREE_BUDGET,
        temperature: float = 0.0,
    ) -> Manner:
        """How a new request's blocks come about: what it says of them in `Submit`."""
        shape = shape_for(verify, nodes, self.ranks, self.costs, self.trees)
        return Manner(self.policy(block_width, verify, temperature), shape, self.lookups)

    def note_answer(self, role: Role, answer: Message, seconds: float) -> None:
        """A daemon answered so long after it was asked: what is not its engine's is hand-over."""
        if isinstance(answer, Verified):
            engine = sum(one.seconds for one in answer.results if isinstance(one, Verdict))
        elif isinstance(answer, Proposed):
            made = [one for one in answer.results if isinstance(one, ProposedItem)]
            engine = sum(one.draft_seconds + one.ingest_seconds for one in made)
        else:
            return
        self.costs.note_hand_over(role, seconds - engine)


class AutoWidth:
    """``E[tokens] / (draft + ingest + verify + hand-over)``, at its best over all widths.

    Two choices a round. First how many rows are asked of the draft, or none: by what rounds that
    ask for so many have made of their time of late (`launch.worth`). Then, when it has said how
    sure it is of each slot, how many are verified: those that emit more than their time would
    elsewhere; of a tree's chain all, since a tree also holds what the chain may miss. While none
    are asked for, some are now and then (`launch.probes`), and what such a block states is evidence
    enough to go on with the draft.
    """

    learns: ClassVar[bool] = True

    def __init__(
        self, experience: Experience, confidence: Confidence, trees: Gain, *, cuts: bool
    ) -> None:
        """`trees`: how many times more tokens than its chain a block of two rows or more emits."""
        self._confidence = confidence
        self._trees = trees
        self._cuts = cuts
        self._costs = experience.costs
        self._experience = experience
        self._own = experience.acceptance.copy()
        self._own.fade(OTHER_TEXT)
        self._worth = experience.worth.copy()
        self._worth.fade(STALE)
        self._probes = replace(experience.probes)
        self._probing = False
        self._timing = False  # whether the round in progress is to time a step
        self._untimed = 0  # rounds in which no other one is
        self._at = Situation(1, 1, 0)  # the last one with a choice
        self._free = False  # whether the round in progress had one
        self._alone = 0  # rounds of width 1, though a draft could be asked
        self._drafted = 0

    def choose(self, situation: Situation) -> Choice:
        widest = min(situation.block_size, situation.budget)
        self._probing = self._timing = False
        self._free = widest > 1
        if not self._free:
            return ALONE
        self._at = situation
        known = self._costs.verify.known_rows
        if known and 1 not in known and not self._alone:
            return ALONE  # nothing can be compared with a step whose price is not known
        rows, pays = self._best(widest)
        is_old = self._costs.verify.is_old(1, situation.position)
        self._timing = pays and is_old and not self._untimed
        if self._timing:
            return ALONE  # what a step costs must stay known
        self._probing = not pays and self._probes.is_due
        return Choice(rows, rows) if pays or self._probing else ALONE

    def cut(self, choice: Choice, confidences: tuple[float, ...]) -> int:
        rows = choice.verify
        verify = self._costs.verify.upto(rows, self._at.position)
        is_whole = self._probes.is_whole if self._probing else not self._cuts
        if rows == 1 or is_whole or not verify or not self._worth.rounds:
            return rows  # at first, too: remembered prices may be those of another day
        chances = self._chances(confidences, rows - 1)
        return worthwhile(emitted(chances), verify, self._rate())[-1]

    def rows_for(self, tokens: Sequence[float], situation: Situation) -> int:
        if 1 not in self._costs.verify.known_rows:
            return 1  # nothing can be compared with a step whose price is not known
        prices = self._costs.alone(len(tokens), situation.position)
        rates = [one / price for one, price in zip(tokens, prices, strict=True)]
        top, usual = max(rates), rates[0]
        rows, pays = self._best(max(1, situation.block_size))
        if pays and self._worth.tokens:
            usual = max(usual, self._worth.rates()[rows - 1])
        return rates.index(top) + 1 if top > CHANCE * usual else 1

    def note(self, outcome: Outcome) -> None:
        self._costs.note(outcome)
        if outcome.drafted:
            self._drafted += 1
        elif self._free:
            self._alone += 1
        # Guesses may take the place of a step, and in every round: there will be no time of one.
        self._untimed = STEP if self._timing and outcome.rows > 1 else max(0, self._untimed - 1)
        self._probes.since += 1
        if outcome.offered:
            self._learn(outcome)
        self._probing = False
        self._experience.probes = self._probes

    def reason(self) -> str:
        rows, pays = self._best(self._at.block_size)
        if self._alone <= self._drafted or pays or not self._worth.rounds:
            return ""  # it was used, or would pay: there was no occasion, or guesses took its place
        rounds, at = self._worth.rounds, rows - 1
        (alone,) = self._costs.alone(1, self._at.position)
        needed = MARGIN * self._worth.seconds[at] / rounds / alone
        made = self._worth.tokens[at] / rounds
        return (
            f"drafting does not pay here: {made:.2f} tokens a round of late, of {needed:.2f} needed"
        )

    def _learn(self, outcome: Outcome) -> None:
        """A block was proposed: what it was worth, and how far what it stated came true."""
        slots = self._at.block_size - 1
        chances = self._chances(outcome.confidences, min(slots, len(outcome.offered)))
        chances += chances[-1:] * (slots - len(chances))
        surprising = self._follow(outcome)
        prices = self._prices(outcome.position)
        if prices is not None:
            if self._probing:
                self._worth.fade(STALE)
            block = self._weigh(chances, prices)
            self._worth.add(block)
            self._experience.worth = self._worth  # and not before: it would fade to nothing
            self._judge(block, prices, surprising=surprising)

    def _weigh(self, chances: Sequence[float], prices: Prices) -> Worth:
        """What a block is worth whose slots are right with such chances."""
        one, *more = emitted(chances)
        tokens = [one, *(self._trees.value * made for made in more)]
        if not self._cuts:
            return weighed(tokens, prices, range(1, len(tokens) + 1))
        return weighed(tokens, prices, worthwhile(tokens, prices.verify, self._rate()))

    def _follow(self, outcome: Outcome) -> bool:
        """How far what was stated came true; whether one that states nothing was right at last."""
        if outcome.confidences:
            self._confidence.note(outcome)
            return False
        known = observed(outcome)
        is_right = known[:1] == [True]
        for acceptance in (self._own, self._experience.acceptance):
            if is_right and next(acceptance.rates()) < RARE:
                acceptance.fade(OLD)
            acceptance.note(outcome.accepted, outcome.drafted)
            if len(known) > outcome.drafted:  # of the first that was cut off
                acceptance.note_slot(outcome.drafted, right=known[-1])
        return is_right and self._own.count < FRESH

    def _judge(self, block: Worth, prices: Prices, *, surprising: bool) -> None:
        """The draft is in use, or is not in spite of this probe."""
        rows, pays = self._best(self._at.block_size)
        if not self._probing:
            self._probes.start_over()
            return
        self._probes.begin()
        if not pays:
            promising = PROMISING if max(block.rates()) > prices.alone else RAREST
            price = prices.ask[rows - 1] * prices.alone
            self._probes.fail(price, again=SURPRISING if surprising else promising)

    def _best(self, widest: int) -> tuple[int, bool]:
        """Rows to ask for, and whether that emits more a second than to ask for none."""
        rates = self._worth.rates()[:widest]
        alone = self._costs.alone(1, self._at.position)
        if len(rates) < 2 or not alone:
            return widest, not rates
        least = min(LEAST, len(rates)) - 1
        best = max(range(least, len(rates)), key=rates.__getitem__)
        return best + 1, rates[best] * alone[0] > MARGIN

    def _rate(self) -> float:
        """Tokens a second that time is worth now; 0 while unknown."""
        alone = self._costs.alone(1, self._at.position)
        return max([1 / alone[0] if alone else 0.0, *self._worth.rates()])

    def _chances(self, confidences: Sequence[float], count: int) -> list[float]:
        """P(slot is right, all before it being so) of the first `count` slots of a block."""
        if len(confidences) >= count:
            return self._confidence.chances(confidences[:count])
        return list(islice(self._own.rates(), count))

    def _prices(self, position: int) -> Prices | None:
        """Of rounds there, up to the whole block; None while unknown."""
        widest = self._at.block_size
        verify = self._costs.alone(widest, position)
        if not verify:
            return None
        return Prices(verify, self._costs.asking(widest, position))
