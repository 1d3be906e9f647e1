"""The first price list of a pair: a short sweep over all widths, or what was remembered.

The sweep is a request like any other, of tokens that mean nothing: each daemon computes in its
turn, and says itself how long it took. Nobody is told of its text.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar, Final

from launch.auto_width import Experience
from launch.cost_cache import CostCache, Key
from launch.costs import Costs
from launch.events import DraftFacts
from launch.policy import Choice, Outcome, Situation, WidthPolicy
from launch.token_ids import pack_ids
from protocol.messages import Finished, Message, Piece, Refused, Sampling, Submit, TargetHello

Sink = Callable[[Message], None]
Submitter = Callable[[Submit, Sink, None, WidthPolicy], None]

MOST_SECONDS: Final = 1.0  # of either daemon
NUMBER: Final = (1 << 63) - 1  # of the request; no client's
PROMPT: Final = 64  # tokens
MAX_TOKENS: Final = 512


class Sweep:
    """A policy that runs widths to learn what they cost: 1 and the whole block most often."""

    learns: ClassVar[bool] = True

    def __init__(self, costs: Costs, block_size: int) -> None:
        ends, between = [1, block_size], [2, 3, *range(4, block_size, 4)]
        inner = [width for width in between if width < block_size]
        self._todo = deque([*ends, *ends, *inner, *inner, *ends])
        self._costs = costs
        self._target_seconds = self._draft_seconds = 0.0

    @property
    def is_done(self) -> bool:
        return not self._todo or max(self._target_seconds, self._draft_seconds) >= MOST_SECONDS

    def choose(self, situation: Situation) -> Choice:
        width = self._todo[0] if self._todo else 1
        rows = max(1, min(width, situation.block_size, situation.budget))
        return Choice(rows, rows)

    def cut(self, choice: Choice, confidences: tuple[float, ...]) -> int:
        del confidences  # what so many rows cost is the question
        return choice.verify

    def rows_for(self, tokens: Sequence[float], situation: Situation) -> int:
        del tokens, situation
        return 1

    def note(self, outcome: Outcome) -> None:
        self._costs.note(outcome)
        self._target_seconds += outcome.verify_seconds
        self._draft_seconds += outcome.draft_seconds + outcome.ingest_seconds
        if self._todo:
            self._todo.popleft()

    def reason(self) -> str:
        return ""


class Calibration:
    """Once for a pair: remembered costs, or a sweep; and remembered again at the end."""

    def __init__(
        self,
        cache: CostCache | None,
        submit: Submitter,
        cancel: Callable[[int], object],
    ) -> None:
        """`submit` runs a request that counts for nobody, with a policy; `cancel` ends it."""
        self._cache = cache
        self._submit = submit
        self._cancel = cancel
        self._key: Key | None = None
        self._sweep: Sweep | None = None
        self._experience = Experience()

    @property
    def is_running(self) -> bool:
        """Whether the sweep goes on."""
        return self._sweep is not None

    def begin(self, key: Key, target: TargetHello, draft: DraftFacts) -> Experience:
        """What requests of this pair begin with; a sweep adds to it while this is running."""
        if self._key == key or self._cache is None:
            return self._experience
        self._key = key
        found = self._cache.load(key)
        self._experience = found or Experience()
        block_size = min(draft.block_size, target.max_width)
        room = target.max_positions - PROMPT
        if found is None and min(block_size, room) > 1:
            self._sweep = Sweep(self._experience.costs, block_size)
            submit = Submit(
                request=NUMBER,
                prompt=pack_ids([number % target.vocab_size for number in range(PROMPT)]),
                max_tokens=min(MAX_TOKENS, room),
                sampling=Sampling(ignore_eos=True),
            )
            self._submit(submit, self._on_message, None, self._sweep)
        return self._experience

    def end(self) -> None:
        """Remember what was learned."""
        if self._cache is not None and self._key is not None and not self.is_running:
            self._cache.save(self._key, self._experience)

    def _on_message(self, message: Message) -> None:
        if isinstance(message, Piece):
            if self._sweep is not None and self._sweep.is_done:
                self._cancel(NUMBER)
        elif isinstance(message, Finished):
            self._sweep = None
            self.end()
        elif isinstance(message, Refused):
            self._sweep = self._key = None  # half a price list is not remembered
