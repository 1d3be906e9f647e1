"""One poll loop over two daemons: it owns every socket, child and deadline, and blocks on none.

A command of a session is *sent*; its reply, its deadline or its daemon's death comes back as an
event to the session that owns it (`launch.desk`). Ctrl-C, a second request, a late reply and a
dead child are all just events.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from launch.crew import Crew
from launch.deadlines_heap import DeadlineHeap, Timer
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
from launch.patience import Patience
from launch.peer import Listed, ListedReply
from launch.plan import Loading, Plan
from launch.reporting import report
from launch.request import Sink
from launch.starter import installed
from launch.stream import FindStop
from launch.turns import ComputeItem, shares_cores
from protocol.client import Poller
from protocol.errors import DaemonError, Unavailable
from protocol.messages import Cancel, Failed, ItemFailed, StatusReport, Submit
from protocol.run_directory import RunDirectory, sweep_orphans


class Supervisor:
    """``with Supervisor(plan) as s`` starts both daemons; leaving ends them and their folder.

    Not for more than one thread. Entering raises ConfigError for a checkpoint that cannot be used;
    it does not wait for loading: `wait_ready` does, and requests may be submitted before.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        on_loading: Callable[[Loading], None] | None = None,
        command: Callable[[Role, Path], Sequence[str]] = installed,
    ) -> None:
        self._plan = plan
        self._tell_loading = on_loading
        self._stack = ExitStack()
        self._poller = Poller()
        self._timers = DeadlineHeap()
        self._crew = Crew(plan, self._poller, self._timers, self, command)
        self._patience = Patience(plan.deadlines)
        self._dispatch = Dispatch(self._crew, self._patience, self._withdraw)
        self._desk = Desk(self._dispatch.send, self._crew.accuse, max_waiting=plan.max_waiting)
        self._watched: dict[int, Callable[[], None]] = {}
        self._run_dir = Path()
        self._began = 0.0
        self._load_seconds = 0.0

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        sweep_orphans()
        named = None if self._plan.run_dir is None else Path(self._plan.run_dir)
        with ExitStack() as stack:
            self._run_dir = stack.enter_context(RunDirectory(named)).path
            stack.enter_context(self._poller)
            self._crew.start(self._run_dir, stack)
            self._stack = stack.pop_all()
        return self

    @property
    def run_dir(self) -> Path:
        """The private folder of this run; only inside the ``with``."""
        return self._run_dir

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End both daemons and remove the run directory; requests that still run are refused."""
        with self._stack:
            self.abandon(Unavailable("the supervisor is ending"))

    def abandon(self, error: DaemonError) -> None:
        """Answer every request that has no answer yet with `error`, at once."""
        self._desk.abandon(error)
        self._desk.deliver()

    # --- what a client asks ------------------------------------------------------------------

    def submit(self, submit: Submit, sink: Sink, find_stop: FindStop | None = None) -> None:
        """Queue a request. `sink` gets Progress and Piece messages, then one Finished or Refused.

        `sink` is called from `step`, and may submit and cancel itself. `find_stop` is asked about
        all tokens before they go out, and may end the text (`launch.stream.stop_finder`).
        """
        self._desk.submit(submit, sink, find_stop)
        self._admit()

    def cancel(self, cancel: Cancel) -> bool:
        """End a request within one round or prefill chunk; it still gets its Finished.

        False when there is none of that number any more.
        """
        known = self._desk.cancel(cancel.request)
        self._admit()
        return known

    def log(self, role: Role) -> str:
        """The end of what a daemon wrote, where it was spawned here."""
        return self._crew.log(role)

    def describe(self) -> StatusReport:
        """What runs, how, and why."""
        return report(
            self._crew,
            self._desk,
            now=time.monotonic(),
            began=self._began,
            load_seconds=self._load_seconds,
        )

    # --- the loop ----------------------------------------------------------------------------

    def step(self, timeout: float | None = None) -> None:
        """Wait at most `timeout` seconds for something to happen, and act on all that did."""
        nearest = self._timers.nearest()
        if self._desk.has_news:
            timeout = 0.0
        elif nearest is not None:
            left = max(0.0, nearest - time.monotonic())
            timeout = left if timeout is None else min(left, timeout)
        for source in self._poller.poll(timeout):
            if not isinstance(source, int):
                self._crew.on_replies(source)
            elif source in self._watched:
                self._watched[source]()
            else:
                self._crew.on_readable(source)
        self._timers.expire(time.monotonic())
        self._desk.deliver()

    def run_until(self, done: Callable[[], bool]) -> None:
        """Step until `done()`; whatever it waits for must be an event of this loop."""
        while not done():
            self.step()

    def wait_ready(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Step until requests can run as planned: target loaded, draft paired or given up.

        Returns False when `stop` said so first. Raises the target's own error if it failed.
        """
        self.run_until(lambda: self._is_settled() or stop())
        error = self._crew.error("target")
        if error is not None and self._crew.is_given_up("target"):
            raise error
        return self._is_settled()

    def watch(self, fd: int, on_ready: Callable[[], None], *, write: bool = False) -> None:
        """Call `on_ready` whenever `fd` can be read, or written if asked for that as well.

        Watching it again changes that.
        """
        self._watched[fd] = on_ready
        self._poller.add(fd, write=write)

    def call_later(self, seconds: float, action: Callable[[], None]) -> Timer:
        """Call `action` from `step`, once, after so many seconds, unless it is called off."""
        return self._timers.add(time.monotonic() + seconds, action)

    def call_off(self, timer: Timer) -> None:
        """Do not; harmless when it was called."""
        self._timers.cancel(timer)

    def unwatch(self, fd: int) -> None:
        """Stop that, before `fd` is closed."""
        del self._watched[fd]
        self._poller.remove(fd)

    def _is_settled(self) -> bool:
        crew = self._crew
        if crew.stage("target") != "ready":
            return crew.is_given_up("target")
        return crew.stage("draft") in ("absent", "ready") or crew.has_failed("draft")

    # --- between sessions and daemons ----------------------------------------------------------

    def _withdraw(self, item: ComputeItem) -> None:
        """Not now: the session that asks is in the middle of its commands."""
        event = Withdrawn(item.round)
        self._timers.add(time.monotonic(), partial(self._desk.handle, item.sequence, event))

    def _admit(self) -> None:
        """Start what can start, and send what may be sent."""
        hello, error = self._crew.target_hello, self._crew.error("target")
        if error is not None and self._crew.is_given_up("target"):
            self._desk.refuse_waiting(error)
        elif self._desk.waiting and hello is not None and self._crew.stage("target") == "ready":
            self._desk.admit(TargetFacts.of(hello), hello.slots, self._draft(), self._crew.no_draft)
        self._dispatch.grant()

    def _draft(self) -> DraftFacts | None:
        hello = self._crew.draft_hello
        ready = hello is not None and self._crew.stage("draft") == "ready"
        return DraftFacts.of(hello) if ready and hello is not None else None

    # --- what the crew reports ---------------------------------------------------------------

    def on_loading(self, loading: Loading) -> None:
        """See `launch.owner.Owner`."""
        if not self._load_seconds and self._is_settled():
            self._load_seconds = time.monotonic() - self._began
        if self._tell_loading is not None:
            self._desk.tell(partial(self._tell_loading, loading))

    def on_up(self, role: Role) -> None:
        """See `launch.owner.Owner`."""
        target, draft = self._crew.target_hello, self._crew.draft_hello
        if role == "target" and target is not None:
            self._desk.broadcast(TargetUp(TargetFacts.of(target)))
        if role == "draft" and target is not None and draft is not None:
            self._patience.seed(self._crew.paired_seconds)
            self._dispatch.share(shared=shares_cores(target.host, draft.host))
            if self._crew.placement is not None:
                self._desk.transport = self._crew.placement.transport
            self._desk.broadcast(DraftUp(DraftFacts.of(draft)))
        self._admit()

    def on_lost(self, role: Role, error: DaemonError, asked: Listed | None) -> None:
        """See `launch.owner.Owner`."""
        self._dispatch.lost(role)
        if role == "draft":
            self._desk.broadcast(DraftDown(str(error)))
        else:
            at = () if asked is None else tuple(item.sequence for item in asked.items)
            self._dispatch.isolate(at)
            self._desk.lose_target(error, at, for_good=self._crew.is_given_up("target"))
        self._admit()

    def on_late(self, role: Role, asked: Listed) -> None:
        """See `launch.owner.Owner`."""
        for item in asked.items:
            self._desk.handle(item.sequence, DeadlineExpired(role, item.round))

    def on_soft(self, role: Role, asked: Listed) -> None:
        """See `launch.owner.Owner`."""
        self._dispatch.late(role, asked)
        for item in asked.items:
            self._desk.handle(item.sequence, DraftLate(item.round))
        self._admit()

    def on_answer(
        self, role: Role, asked: Listed, answer: ListedReply | Failed, seconds: float
    ) -> None:
        """See `launch.owner.Owner`."""
        self._dispatch.answered(role, asked, seconds)
        self._desk.experience.note_answer(role, answer, seconds)
        results = _refusals(asked, answer) if isinstance(answer, Failed) else answer.results
        for item in results:
            reply = Reply(role, answer.target_life, answer.draft_life, item)
            self._desk.handle(item.sequence, reply)
        self._admit()


def _refusals(asked: Listed, answer: Failed) -> tuple[ItemFailed, ...]:
    """A refused message is refused for each of its sequences."""
    return tuple(
        ItemFailed(sequence=item.sequence, round=item.round, code=answer.code, detail=answer.detail)
        for item in asked.items
    )
