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
from typing import Self

from launch.deadlines_heap import DeadlineHeap, Timer
from launch.events import Role
from launch.mediator import Mediator
from launch.parking import Answer
from launch.plan import Loading, Plan
from launch.reporting import report
from launch.request import Sink
from launch.starter import installed
from launch.stream import FindStop
from launch.watching import Watching
from protocol.client import Poller
from protocol.closing import Closing
from protocol.errors import DaemonError, Unavailable
from protocol.messages import Cancel, StatusReport, Submit
from protocol.run_directory import RunDirectory, sweep_orphans


class Supervisor(Watching, Closing):
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
        self._mediator = Mediator(
            plan, self._poller, self._timers, on_loading=self._on_loading, command=command
        )
        self._crew, self._desk = self._mediator.crew, self._mediator.desk
        self._parking = self._mediator.parking
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

    def close(self) -> None:
        """End both daemons and remove the run directory; requests that still run are refused."""
        with self._stack:
            self._mediator.calibration.end()
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
        self._parking.note_submitted()
        self._mediator.admit()

    def cancel(self, cancel: Cancel) -> bool:
        """End a request within one round or prefill chunk; it still gets its Finished.

        False when there is none of that number any more.
        """
        known = self._desk.cancel(cancel.request)
        self._mediator.admit()
        return known

    def log(self, role: Role) -> str:
        """The end of what a daemon wrote, where it was spawned here."""
        return self._crew.log(role)

    def park(self, role: Role, answer: Answer, *, now: bool = False, within: float) -> None:
        """End a daemon to free its memory; `answer` gets what was done, or why not, once."""
        if self._mediator.swapping.is_busy:
            answer(Unavailable("another draft is taking over: wait for that"))
        else:
            self._parking.park(role, answer, now=now, within=within)

    def unpark(self, role: Role, answer: Answer) -> None:
        """Start it again; requests that were paused go on where they were."""
        self._parking.unpark(role, answer)
        self._mediator.admit()

    def swap(self, draft: str, answer: Answer) -> None:
        """Put another draft in the present one's place; requests go on, their text unchanged."""
        self._mediator.swapping.swap(draft, answer)

    @property
    def no_target(self) -> str:
        """Why new requests wait until somebody acts; empty where they do not."""
        return self._parking.no_target

    def describe(self) -> StatusReport:
        """What runs, how, and why."""
        return report(
            self._crew,
            self._desk,
            self._parking,
            now=time.monotonic(),
            began=self._began,
            load_seconds=self._load_seconds,
        )

    # --- the loop ----------------------------------------------------------------------------

    def step(self, timeout: float | None = None) -> None:
        """Wait at most `timeout` seconds for something to happen, and act on all that did."""
        self._mediator.settle()
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
        """Step until requests can run as planned: target loaded, draft paired or given up, priced.

        Returns False when `stop` said so first. Raises the target's own error if it failed.
        """
        calibration = self._mediator.calibration
        self.run_until(lambda: (self._is_settled() and not calibration.is_running) or stop())
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

    def _on_loading(self, loading: Loading) -> None:
        if not self._load_seconds and self._is_settled():
            self._load_seconds = time.monotonic() - self._began
        if self._tell_loading is not None:
            self._desk.tell(partial(self._tell_loading, loading))
