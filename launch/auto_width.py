"""The width that emits the most tokens a second, learned while decoding. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

from launch.acceptance import Acceptance
from launch.confidence import Confidence, observed, worthwhile
from launch.costs import Costs
from launch.events import Role
from launch.lookups import Rates, unknown
from launch.policy import ALONE, AUTO, Choice, FixedWidth, Outcome, Situation, WidthPolicy
from launch.probes import SCOUT, Probes, Shadow
from launch.shapes import Gain, Manner, shape_for
from launch.tree import Ranks
from protocol.messages import (
    DEFAULT_TREE_BUDGET,
    Message,
    Proposed,
    ProposedItem,
    TreeVerify,
    Verdict,
    Verified,
)

HYSTERESIS: Final = 1.03  # another width must promise so much more than the one in use
CHANCE: Final = 1.1  # the same of n-grams: the best of many rates that little is known of flatters
OLD: Final = 2.0  # rounds that all outcomes before a probe count for: times may have changed
RARE: Final = 0.2  # a draft whose first slot is right less often is not expected to be
HOPE: Final = 0.7  # how often each slot is right where a draft that was not used pays again
OTHER_TEXT: Final = 6.0  # the same for outcomes of earlier requests


@dataclass(slots=True)
class Experience:
    """What is known of one pair of daemons, whoever's request it came from."""

    costs: Costs = field(default_factory=Costs)
    acceptance: Acceptance = field(default_factory=Acceptance)
    probes: Probes = field(default_factory=Probes)  # as the last request left them
    ranks: Ranks = field(default_factory=Ranks)
    trees: Gain = field(default_factory=Gain)
    lookups: Rates = field(default_factory=unknown)  # of n-grams
    confidence: Confidence = field(default_factory=Confidence)

    def policy(self, block_width: int, verify: TreeVerify = "chain") -> WidthPolicy:
        """The policy of a new request: `block_width` rows, or AUTO."""
        if block_width != AUTO:
            return FixedWidth(block_width)
        return AutoWidth(self, self.trees if verify == "auto" else Gain())

    def manner(
        self, block_width: int, verify: TreeVerify = "chain", nodes: int = DEFAULT_TREE_BUDGET
    ) -> Manner:
        """How a new request's blocks come about: what it says of them in `Submit`."""
        shape = shape_for(verify, nodes, self.ranks, self.costs, self.trees)
        return Manner(self.policy(block_width, verify), shape, self.lookups)

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

    Width 1 is among them and asks no draft; all others have the gain of trees, where a request
    takes them. Below full width the whole block is proposed now and
    then (`launch.probes`). At width 1 a probe is a narrow block and spends the draft's time alone:
    the target goes on one token at a time, and what it chooses says whether it was right.
    """

    learns: ClassVar[bool] = True

    def __init__(self, experience: Experience, trees: Gain) -> None:
        self._trees = trees
        self._costs = experience.costs
        self._experience = experience
        self._shared = experience.acceptance
        self._own = experience.acceptance.copy()
        self._own.fade(OTHER_TEXT)
        self._probes = replace(experience.probes, trial=False)
        self._probing = False
        self._first = True  # whether the last probe follows none that has paid
        self._shadow: Shadow | None = None
        self._width = 0  # in use; 0: none yet
        self._at = Situation(1, 1, 0)  # the last one with a choice
        self._free = False  # whether the round in progress had one
        self._alone = 0  # rounds of width 1, though a draft could be asked
        self._drafted = 0

    def choose(self, situation: Situation) -> Choice:
        widest = min(situation.block_size, situation.budget)
        self._probing, self._free = False, widest > 1
        if not self._free:
            return ALONE
        self._at = situation
        known = self._costs.verify.known_rows
        if known and 1 not in known and not self._alone:
            return ALONE  # nothing can be compared with a step whose price is not known
        width = self._best(widest)
        if width != self._width:
            if self._width:
                self._probes.start_over()
            self._width = width
        self._probing = width < widest and self._probes.is_due
        return self._probe(widest) if self._probing else Choice(width, width)

    def cut(self, choice: Choice, confidences: tuple[float, ...]) -> int:
        rows, position = choice.verify, self._at.position
        if self._probing or not 1 < rows <= len(confidences) + 1:
            return rows
        tokens = self._own.tokens(rows)
        seconds = self._costs.verify.upto(rows, position)
        prices = self._costs.rounds(tokens, position)
        if not prices or not prices[-1]:
            return rows
        rates = self._experience.confidence.rates(self._own.rates(), confidences[: rows - 1])
        return worthwhile(rates, seconds, tokens[-1] / prices[-1])

    def rows_for(self, tokens: Sequence[float], situation: Situation) -> int:
        if 1 not in self._costs.verify.known_rows:
            return 1  # nothing can be compared with a step whose price is not known
        prices = self._costs.alone(len(tokens), situation.position)
        if not all(prices):
            return 1
        rates = [one / price for one, price in zip(tokens, prices, strict=True)]
        widest = max(1, min(self._width, situation.block_size))
        drafted = self._rates(self._own.tokens(widest), situation.position) if widest > 1 else []
        usual = [rates[0], *drafted[-1:]]
        top = max(rates)
        return rates.index(top) + 1 if top > CHANCE * max(usual) else 1

    def note(self, outcome: Outcome) -> None:
        self._costs.note(outcome)
        if outcome.drafted:
            self._drafted += 1
        elif self._free:
            self._alone += 1
        self._probes.since += 1
        if len(outcome.offered) + 1 >= self._at.block_size:
            self._probes.since = 0
        if outcome.offered and self._probing:
            self._begin_probe(outcome)
        if self._shadow is not None:
            self._follow(self._shadow, outcome.tokens)
        if outcome.drafted:
            self._learn(outcome)
            if self._probing:
                self._judge(outcome.accepted + 1, outcome.drafted + 1)
        self._probing = False
        self._experience.probes = self._probes

    def _learn(self, outcome: Outcome) -> None:
        """Proposals were verified: how many were right, and what had been stated of them."""
        if outcome.confidences:
            self._experience.confidence.note(self._own.rates(), outcome)
        known = observed(outcome)
        for acceptance in (self._own, self._shared):
            acceptance.note(outcome.accepted, outcome.drafted)
            if len(known) > outcome.drafted:  # of the first that was cut off
                acceptance.note_slot(outcome.drafted, right=known[-1])

    def reason(self) -> str:
        if self._alone <= self._drafted:
            return ""
        tokens = self._own.tokens(self._at.block_size)
        rates = self._rates(tokens)
        if len(rates) < 2:
            return ""
        best = rates.index(max(rates[1:]), 1)
        if rates[best] > HYSTERESIS * rates[0]:
            return ""  # it would pay: there was no occasion, or guesses took its place
        emitted = tokens[best] * self._trees.value
        return (
            f"drafting does not pay here: {emitted:.1f} tokens a round against a cost of "
            f"{emitted * rates[0] / rates[best]:.1f} steps"
        )

    def _rates(self, tokens: Sequence[float], position: int | None = None) -> list[float]:
        """Tokens a second of rounds of 1, 2, ... rows that emit so many; empty while unknown.

        Without a `position`, where the last choice was made.
        """
        prices = self._costs.rounds(tokens, self._at.position if position is None else position)
        if not prices or not prices[0]:
            return []
        rates = [one / price for one, price in zip(tokens, prices, strict=True)]
        return [rates[0], *(rate * self._trees.value for rate in rates[1:])]

    def _best(self, widest: int) -> int:
        """The best width, or the one in use where that is hardly worse."""
        rates = self._rates(self._own.tokens(widest))
        if not rates:
            return widest
        top = max(rates)
        best = rates.index(top) + 1
        if not 0 < self._width <= widest:
            return best
        margin = HYSTERESIS
        if best == 1:  # where nothing more is learned: not on the word of a few rounds
            margin += 1 / self._own.count
        return self._width if top <= rates[self._width - 1] * margin else best

    def _probe(self, widest: int) -> Choice:
        """At width 1, one token that is not verified; where that was right, a block in earnest."""
        if self._width == 1 and not self._probes.is_whole:
            return Choice(SCOUT, 1)
        rows = self._hoped(widest) if self._width == 1 and self._probes.trial else widest
        return Choice(rows, rows)

    def _hoped(self, widest: int) -> int:
        """The best width for a draft that is usually right."""
        tokens = [sum(HOPE**slot for slot in range(rows)) for rows in range(1, widest + 1)]
        rates = self._rates(tokens) or [0.0]
        return max(rates.index(max(rates)) + 1, SCOUT)

    def _begin_probe(self, outcome: Outcome) -> None:
        self._first = not self._probes.trial
        self._probes.begin()
        self._shadow = None if outcome.drafted else Shadow(outcome.offered)

    def _follow(self, shadow: Shadow, tokens: tuple[int, ...]) -> None:
        """Hold the tokens of this round against what the probe proposed for them."""
        for token in tokens:
            slot = shadow.right
            right = shadow.meet(token)
            for acceptance in (self._own, self._shared):
                acceptance.note_slot(slot, right=right)
            if shadow.is_over:
                self._shadow = None
                self._judge(shadow.right + 1, len(shadow.ids) + 1)
                return

    def _judge(self, tokens: int, rows: int) -> None:
        """A probe of so many rows brought so many tokens, or would have."""
        if self._pays(tokens, rows):
            self._probes.trial = True
            if not self._first:  # two in a row are no luck
                self._own.fade(OLD)
                self._own.note(tokens - 1, tokens - 1)
            return
        used = self._width
        prices = self._costs.rounds([1.0] * self._at.block_size, self._at.position)
        more = prices[rows - 1] - prices[used - 1]
        if used == 1 and not self._probes.is_whole:
            verify = self._costs.verify.upto(rows, self._at.position)
            more -= verify[-1] - verify[0]
        was_rare = next(self._own.rates()) < RARE
        self._probes.fail(more / prices[used - 1], in_doubt=was_rare and not self._first)

    def _pays(self, tokens: int, rows: int) -> bool:
        """Whether a block of `rows` that brings `tokens` beats the width in use."""
        usual = self._own.tokens(max(1, self._width))[-1]
        emitted = [usual] * (max(rows, self._width) - 1) + [tokens]
        rates = self._rates(emitted)
        return bool(rates) and rates[rows - 1] > rates[self._width - 1]
