"""The requests of one supervisor: who waits, who runs, and what each client is still to be told."""

import itertools
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from launch.admission import check_base, check_hints, check_prompt, check_tree
from launch.auto_width import Experience
from launch.coupling import Couplings
from launch.events import (
    Accuse,
    CancelRequested,
    Command,
    DraftFacts,
    Emit,
    Event,
    Fail,
    Finish,
    Reason,
    Request,
    Role,
    Send,
    Start,
    TargetDown,
    TargetFacts,
)
from launch.policy import WidthPolicy
from launch.request import ActiveRequest, Sink, Totals
from launch.session import Session
from launch.shapes import Chain, Manner
from launch.statistics import Clock, statistics
from launch.stream import FindStop
from launch.token_ids import WIDTH
from protocol.errors import DaemonError, Overloaded, UsageError
from protocol.messages import Finished, Piece, Refused, Submit

MAX_DETAIL: Final = 4096
_NO_TARGET: Final = TargetFacts(0, 0, 0, 1, 0, 1)  # for the figures of what never began


class Desk:
    """Feeds events to sessions and performs their commands.

    `send` takes what goes to a daemon, `accuse` the life of a daemon that is not to be trusted.
    Clients are told in `deliver` alone, after everything was sent: a slow client delays no
    daemon, and one that raises leaves nothing half done.
    """

    def __init__(
        self,
        send: Callable[[Role, Request], None],
        accuse: Callable[[Accuse], None],
        *,
        max_waiting: int,
    ) -> None:
        self._send = send
        self._accuse = accuse
        self._max_waiting = max_waiting
        self._numbers = itertools.count(1)
        self._waiting: deque[ActiveRequest] = deque()
        self._running: dict[int, ActiveRequest] = {}  # by sequence
        self._outbox: deque[Callable[[], None]] = deque()
        self.experience = Experience()
        self._couplings = Couplings()
        self.transport = "none"
        self.finished = 0
        self.refused = 0
        self.num_stale_replies = 0  # for nobody
        self.totals = Totals()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return sum(request.policy is None for request in self._running.values())

    @property
    def requests(self) -> tuple[ActiveRequest, ...]:
        """Clients' that have no answer yet: those that run, then those that wait."""
        return tuple(request for request in self._all if request.policy is None)

    @property
    def _all(self) -> tuple[ActiveRequest, ...]:
        return (*self._running.values(), *self._waiting)

    @property
    def uses_draft(self) -> bool:
        """Whether a request that runs may still ask the draft for something."""
        sessions = (request.session for request in self._running.values())
        return any(each is not None and each.draft.stage != "absent" for each in sessions)

    @property
    def has_news(self) -> bool:
        """Whether a client is still to be told something."""
        return bool(self._outbox)

    def submit(
        self,
        submit: Submit,
        sink: Sink,
        find_stop: FindStop | None = None,
        policy: WidthPolicy | None = None,
    ) -> None:
        """Queue a request; `sink` gets Progress and Piece, then one Finished or Refused.

        `find_stop` is asked about all tokens before they go out, and may end the text. One with a
        `policy` of its own is the supervisor's, and is counted nowhere.
        """
        request = ActiveRequest(submit, sink, Clock(time.monotonic()), find_stop, policy=policy)
        if any(other.submit.request == submit.request for other in self._all):
            self._refuse(request, UsageError(f"request {submit.request} is running already"))
        elif len(self._waiting) >= self._max_waiting:
            self._refuse(request, Overloaded(f"as many requests wait as may: {self._max_waiting}"))
        else:
            self._waiting.append(request)

    def cancel(self, number: int) -> bool:
        """End a request; False, and nothing changed, for one that is unknown or has ended."""
        for request in self._all:
            if request.submit.request != number:
                continue
            if request.session is not None:
                self.handle(request.session.sequence, CancelRequested())
            else:
                self._waiting.remove(request)
                self._conclude(request, self._begin(request, _NO_TARGET, None, ""), "cancelled")
            return True
        return False

    def admit(
        self, target: TargetFacts, slots: int, draft: DraftFacts | None, no_draft: str
    ) -> None:
        """Start as many waiting requests as there are free slots."""
        while self._waiting and len(self._running) < slots:
            request = self._waiting.popleft()
            submit = request.submit
            try:
                tokens = len(submit.prompt) // WIDTH
                check_prompt(tokens, submit.max_tokens, target.max_positions)
                check_base(submit.base_pos, tokens)
                check_hints(submit.hints, target.vocab_size)
                check_tree(submit.verify, submit.tree_budget, target, draft)
            except DaemonError as error:
                self._refuse(request, error)
                continue
            session = self._begin(request, target, draft, no_draft)
            self._running[session.sequence] = request
            self.handle(session.sequence, Start())

    def handle(self, sequence: int, event: Event) -> None:
        """Feed one session; an event for one that has ended is counted and dropped."""
        request = self._running.get(sequence)
        if request is None or request.session is None:
            self.num_stale_replies += 1
            return
        self._perform(request, request.session, request.session.handle(event))

    def broadcast(self, event: Event) -> None:
        """Feed all sessions."""
        for sequence in tuple(self._running):
            self.handle(sequence, event)

    def lose_target(self, error: DaemonError, at: tuple[int, ...], *, for_good: bool) -> None:
        """The target died while it was at these sequences; another life follows if not `for_good`.

        One alone, at which it dies a second time without having come further, is failed.
        """
        for sequence in tuple(self._running):
            request = self._running[sequence]
            fatal = for_good or (at == (sequence,) and self._is_second_death(request))
            self.handle(sequence, TargetDown(error, fatal))

    def _is_second_death(self, request: ActiveRequest) -> bool:
        progress = None if request.session is None else request.session.progress
        before, request.died_at = request.died_at, progress
        return before is not None and before == progress

    def refuse_waiting(self, error: DaemonError) -> None:
        """Answer those that nothing can be done for."""
        while self._waiting:
            self._refuse(self._waiting.popleft(), error)

    def refuse_older(self, than: float, error: DaemonError) -> float | None:
        """Answer those that were submitted by then and still wait; when the next one was."""
        while self._waiting and self._waiting[0].clock.submitted <= than:
            self._refuse(self._waiting.popleft(), error)
        return self._waiting[0].clock.submitted if self._waiting else None

    def abandon(self, error: DaemonError) -> None:
        """The supervisor ends: whoever has no answer yet gets this one."""
        self.refuse_waiting(error)
        for sequence in tuple(self._running):
            self._refuse(self._running.pop(sequence), error)

    def settle(self) -> None:
        """Count what events have brought, before the loop waits."""
        for request in self._running.values():
            if request.session is not None:
                request.session.settle()

    def deliver(self) -> None:
        """Tell the clients."""
        while self._outbox:
            self._outbox.popleft()()

    def tell(self, call: Callable[[], None]) -> None:
        """Call from `deliver`, in order with everything else that clients are told."""
        self._outbox.append(call)

    def _begin(
        self, request: ActiveRequest, target: TargetFacts, draft: DraftFacts | None, no_draft: str
    ) -> Session:
        sequence, submit = next(self._numbers), request.submit
        request.session = Session(
            submit,
            sequence,
            target,
            draft,
            no_draft=no_draft,
            manner=self._manner(request),
            find_stop=request.find_stop,
            coupling=self._couplings.at(submit.sampling.temperature),
        )
        return request.session

    def _manner(self, request: ActiveRequest) -> Manner:
        """How its blocks come about; a request with a policy of its own verifies chains."""
        if request.policy is not None:
            return Manner(request.policy, Chain())
        submit = request.submit
        temperature = submit.sampling.temperature
        return self.experience.manner(
            submit.block_width, submit.verify, submit.tree_budget, temperature
        )

    def _perform(
        self, request: ActiveRequest, session: Session, commands: tuple[Command, ...]
    ) -> None:
        for command in commands:
            match command:
                case Send(role, item):
                    self._send(role, item)
                case Emit(message):
                    if isinstance(message, Piece):
                        request.clock.mark(time.monotonic())
                    self.tell(partial(request.sink, message))
                case Accuse():
                    self._accuse(command)
                case Finish(reason):
                    del self._running[session.sequence]
                    self._conclude(request, session, reason)
                case Fail(error):
                    del self._running[session.sequence]
                    self._refuse(request, error)

    def _conclude(self, request: ActiveRequest, session: Session, reason: Reason) -> None:
        figures = statistics(
            session.tally,
            request.clock,
            tokens=(session.journal.prompt_tokens, session.journal.emitted),
            mode=session.mode,
            shape=session.shape,
            transport=self.transport,
            target=(session.target.exact, session.target.rollback),
            stale=session.num_stale_replies,
        )
        number = request.submit.request
        if request.policy is None:
            self.finished += 1
            self.totals.add(session)
        finished = Finished(request=number, finish_reason=reason, statistics=figures)
        self.tell(partial(request.sink, finished))

    def _refuse(self, request: ActiveRequest, error: DaemonError) -> None:
        self.refused += request.policy is None
        if request.session is not None and request.policy is None:
            self.totals.add(request.session)
        refusal = Refused(
            request=request.submit.request, code=error.code, detail=str(error)[:MAX_DETAIL]
        )
        self.tell(partial(request.sink, refusal))
