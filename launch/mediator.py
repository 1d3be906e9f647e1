"""Between sessions and daemons: what sessions ask is sent, what daemons do becomes their events.

It acts inside the supervisor's loop alone, and waits for nothing.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from launch.calibration import Calibration
from launch.cost_cache import CostCache, key_of
from launch.crew import Crew
from launch.deadlines_heap import DeadlineHeap
from launch.desk import Desk
from launch.dispatch import Dispatch
from launch.events import (
    DeadlineExpired,
    DraftDown,
    DraftFacts,
    DraftLate,
    DraftUp,
    Reply,
    Role,
    TargetFacts,
    TargetUp,
    Withdrawn,
)
from launch.parking import Parking
from launch.patience import Patience
from launch.peer import Answer, Listed, refusals
from launch.plan import Loading, Plan
from launch.swapping import Swapping
from launch.turns import ComputeItem, shares_cores
from protocol.client import Poller
from protocol.errors import DaemonError
from protocol.messages import Failed


class Mediator:
    """The `launch.owner.Owner` of a crew, and the requests of one desk."""

    def __init__(
        self,
        plan: Plan,
        poller: Poller,
        timers: DeadlineHeap,
        *,
        on_loading: Callable[[Loading], None],
        command: Callable[[Role, Path], Sequence[str]],
    ) -> None:
        self._plan = plan
        self._timers = timers
        self._on_loading = on_loading
        self.crew = Crew(plan, poller, timers, self, command)
        self._patience = Patience(plan.deadlines)
        self._answers: deque[tuple[Role, Answer, float]] = deque()
        self._dispatch = Dispatch(self.crew, self._patience, self._withdraw)
        self.desk = Desk(self._dispatch.send, self.crew.accuse, max_waiting=plan.max_waiting)
        cache = None if plan.cost_cache is None else CostCache(Path(plan.cost_cache))
        self.calibration = Calibration(cache, self.desk.submit, self.desk.cancel)
        self.parking = Parking(self.crew, self.desk, self._dispatch, timers)
        self.swapping = Swapping(self.crew, self.desk, self._dispatch, self.parking)

    def admit(self) -> None:
        """Start what can start, and send what may be sent."""
        if self.desk.waiting:
            self._begin()
        self._dispatch.grant()
        self.parking.advance()

    def _begin(self) -> None:
        hello, error = self.crew.target_hello, self.crew.error("target")
        if error is not None and self.crew.is_given_up("target"):
            self.desk.refuse_waiting(error)
        elif hello is not None and self.crew.stage("target") == "ready" and self.parking.is_ready:
            facts, reason = TargetFacts.of(hello), self.parking.no_draft or self.crew.no_draft
            self.desk.admit(facts, hello.slots, self._draft(), reason)

    def on_loading(self, loading: Loading) -> None:
        """See `launch.owner.Owner`."""
        self._on_loading(loading)

    def on_up(self, role: Role) -> None:
        """See `launch.owner.Owner`."""
        target, draft = self.crew.target_hello, self.crew.draft_hello
        if role == "target" and target is not None:
            self.desk.broadcast(TargetUp(TargetFacts.of(target)))
        if role == "draft" and target is not None and draft is not None:
            self._patience.seed(self.crew.paired_seconds)
            self._dispatch.share(shared=shares_cores(target.host, draft.host))
            if self.crew.placement is not None:
                self.desk.transport = self.crew.placement.transport
            facts = DraftFacts.of(draft, self.crew.doubt)
            if not self.parking.holds("draft"):
                self.desk.broadcast(DraftUp(facts))
            key = key_of(self._plan, target, draft)
            self.desk.experience = self.calibration.begin(key, target, facts)
        self.parking.on_up(role)
        self.swapping.on_up(role)
        self.admit()

    def on_lost(self, role: Role, error: DaemonError, asked: Listed | None) -> None:
        """See `launch.owner.Owner`."""
        self._dispatch.lost(role)
        self.parking.on_lost(role, error)
        self.swapping.on_lost(role, error)
        if role == "draft":
            self.desk.broadcast(DraftDown(str(error)))
        else:
            at = () if asked is None else tuple(item.sequence for item in asked.items)
            self._dispatch.isolate(at)
            self.desk.lose_target(error, at, for_good=self.crew.is_given_up("target"))
        self.admit()

    def on_parked(self) -> None:
        """See `launch.owner.Owner`."""
        self.parking.on_parked()

    def on_candidate(self, error: DaemonError | None) -> None:
        """See `launch.owner.Owner`."""
        self.swapping.on_candidate(error)
        self.admit()

    def on_late(self, role: Role, asked: Listed) -> None:
        """See `launch.owner.Owner`."""
        for item in asked.items:
            self.desk.handle(item.sequence, DeadlineExpired(role, item.round))

    def on_soft(self, role: Role, asked: Listed) -> None:
        """See `launch.owner.Owner`."""
        self._dispatch.late(role, asked)
        for item in asked.items:
            self.desk.handle(item.sequence, DraftLate(item.round))
        self.admit()

    def on_answer(self, role: Role, asked: Listed, answer: Answer, seconds: float) -> None:
        """See `launch.owner.Owner`. What comes next is asked first; `settle` learns from it."""
        self._dispatch.answered(role, asked, seconds)
        results = refusals(asked, answer) if isinstance(answer, Failed) else answer.results
        for item in results:
            reply = Reply(role, answer.target_life, answer.draft_life, item)
            self.desk.handle(item.sequence, reply)
        self._dispatch.grant()
        self._answers.append((role, answer, seconds))
        self.admit()

    def settle(self) -> None:
        """Before the loop waits: learn from answers, and set deadlines by what was learned."""
        while self._answers:
            self.desk.experience.note_answer(*self._answers.popleft())
        self.desk.settle()
        self._dispatch.settle()
        self.crew.settle()

    def _withdraw(self, item: ComputeItem) -> None:
        """Not now: the session that asks is in the middle of its commands."""
        event = Withdrawn(item.round)
        self._timers.add(time.monotonic(), partial(self.desk.handle, item.sequence, event))

    def _draft(self) -> DraftFacts | None:
        hello = self.crew.draft_hello
        ready = self.crew.stage("draft") == "ready" and not self.parking.holds("draft")
        return DraftFacts.of(hello, self.crew.doubt) if ready and hello is not None else None
