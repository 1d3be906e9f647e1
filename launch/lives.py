"""The life of each daemon: started with a number of its own, ended, and started again in time.

A lost daemon is started again with a new life, after a back-off that grows from failure to failure.
A parked one is started again when it is unparked, and that counts as no restart.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from launch.children import Children
from launch.daemon_process import Event
from launch.deadlines_heap import DeadlineHeap
from launch.events import Role
from launch.loads import Loads
from launch.peer import Listed, Peer, Sent
from launch.plan import Plan
from launch.restart import Backoff
from launch.starter import Spawner, Starter, starter_for
from launch.understudy import Understudy
from protocol.client import Poller
from protocol.errors import DaemonError, PermissionRefused, UsageError

OnOver: TypeAlias = Callable[[Peer, DaemonError, Listed | None], None]


@dataclass(frozen=True)
class Listeners:
    """Who hears what of the lives.

    `tell` of every stage of a peer, and `on_event` what its process says. `on_over`: a life has
    ended by itself or was ended for a reason; nothing that was asked of it will be answered, and
    what it was at. `on_parked`: the process of a parked daemon has ended, maybe more than once.
    `on_candidate`: why the draft that was to take over cannot.
    """

    tell: Callable[[Peer], None]
    on_event: Callable[[Peer, Event], None]
    on_over: OnOver
    on_parked: Callable[[], None]
    on_candidate: Callable[[DaemonError], None]


class Lives:
    """Constructing starts nothing; `start` does, and `stack` ends what was started."""

    def __init__(
        self,
        plan: Plan,
        poller: Poller,
        timers: DeadlineHeap,
        command: Callable[[Role, Path], Sequence[str]],
        listeners: Listeners,
    ) -> None:
        self._plan = plan
        self._poller = poller
        self._timers = timers
        self._command = command
        self._hears = listeners
        self._served: set[Role] = set()  # in any life
        self._starter: Starter | None = None
        self.understudy = Understudy(self)
        self._stale = 0  # replies of lives that are over
        self._loads = Loads(plan.deadlines)
        self._backoffs: dict[Role, Backoff] = {
            role: Backoff(plan.restarts) for role in ("target", "draft")
        }
        self.peers: dict[Role, Peer] = {}  # of the present lives
        self.children = Children(poller, timers, self._on_events)
        self.restarts: dict[Role, int] = {"target": 0, "draft": 0}

    def start(self, run_dir: Path, stack: ExitStack) -> None:
        """Start both daemons, or attach to them; raises what `starter_for` raises."""
        self._starter = starter_for(self._plan, run_dir, self._command)
        stack.callback(self._starter.close)
        stack.callback(self._close_all)
        for role in self._starter.roles:
            self._begin(self._starter, role)

    @property
    def ring_address(self) -> str:
        """Where the target offers its ring; once started."""
        return "" if self._starter is None else self._starter.ring_address

    @property
    def spawner(self) -> Spawner:
        """Where configs can be changed; UsageError for daemons that were not spawned here."""
        if not isinstance(self._starter, Spawner):
            raise UsageError("the daemons are services of their own: start those in another way")
        return self._starter

    @property
    def candidate(self) -> Peer | None:
        """The draft that may take over, while it loads."""
        return self.understudy.candidate

    @property
    def everyone(self) -> tuple[Peer, ...]:
        """The present lives, and those that wait beside them."""
        beside = (self.understudy.candidate, self.understudy.spare)
        return (*self.peers.values(), *(peer for peer in beside if peer is not None))

    def linked(self, link: object) -> Peer | None:
        """Who answers over `link`, unless nothing can be asked of it any more."""
        for peer in (*self.peers.values(), self.understudy.candidate, self.understudy.spare):
            if peer is not None and peer.answers_over(link):
                return peer
        return None

    @property
    def num_stale_replies(self) -> int:
        return self._stale + sum(peer.num_stale_replies for peer in self.peers.values())

    def is_given_up(self, role: Role) -> bool:
        """Whether it failed before it ever served, or so often that it is tried rarely."""
        peer = self.peers.get(role)
        if peer is None or peer.stage != "failed":
            return False
        return self._backoffs[role].is_left_off or not self._may_restart(peer)

    def has_failed(self, role: Role) -> bool:
        """Whether its last start came to nothing, or its last life ended."""
        return self._backoffs[role].failures > 0

    def note_up(self, peer: Peer) -> None:
        """It serves."""
        self._served.add(peer.role)
        self._backoffs[peer.role].up(time.monotonic())

    def note_loaded(self, peer: Peer) -> None:
        """It has loaded, in time."""
        if peer.load_timer.action is not None and peer is not self.understudy.candidate:
            self._loads.note(peer.role, time.monotonic() - peer.began)
        self._timers.cancel(peer.load_timer)

    def lose(self, peer: Peer, error: DaemonError, *, kill: bool) -> None:
        """Its life is over. A second reason changes nothing."""
        if peer.is_over:
            return
        peer.stage, peer.error = "failed", error
        sent = self.end(peer, kill=kill)
        if self.understudy.lost(peer):
            self._hears.on_candidate(error)
        if self.peers.get(peer.role) is not peer:
            return
        asked = next((one.message for one in sent if isinstance(one.message, Listed)), None)
        self._note_failure(peer, error, asked)

    def _note_failure(self, peer: Peer, error: DaemonError, asked: Listed | None) -> None:
        now = time.monotonic()
        delay = self._backoffs[peer.role].failed(now, error)
        self._hears.tell(peer)
        if self._may_restart(peer):
            peer.restart_at = now + delay
            self._timers.add(peer.restart_at, partial(self.restart_if_due, peer))
        self._hears.on_over(peer, error, asked)

    def park(self, role: Role) -> None:
        """End its process in good order, and start no other before `unpark`."""
        peer = self.peers.get(role)
        if peer is None or peer.stage == "parked":
            return
        if not peer.is_over:
            self.end(peer, kill=False)
        peer.stage, peer.error, peer.restart_at = "parked", None, None
        self._hears.tell(peer)
        self.restart_if_due(peer)

    def unpark(self, role: Role) -> None:
        """Start a parked daemon again, as soon as its process of before has ended."""
        peer = self.peers.get(role)
        if peer is not None and peer.stage == "parked":
            peer.restart_at = time.monotonic()
            self.restart_if_due(peer)

    def renew(self, role: Role) -> None:
        """End its life in good order and begin another, as its config says by now."""
        self.park(role)
        self.forgive(role)
        self.unpark(role)

    def forgive(self, role: Role) -> None:
        """Forget its failures: what comes next is another daemon."""
        self._backoffs[role] = Backoff(self._plan.restarts)
        self._loads.forget(role)

    def is_gone(self, role: Role) -> bool:
        """Whether it has no process, and will get none."""
        peer = self.peers.get(role)
        return peer is None or (peer.stage == "parked" and peer.has_ended)

    def restart_if_due(self, peer: Peer) -> None:
        """Not before its process has ended: it may still hold, or remove, the socket's name."""
        if peer.stage == "parked" and peer.restart_at is None and peer.has_ended:
            self._hears.on_parked()
        late = peer.restart_at is not None and time.monotonic() >= peer.restart_at
        if not late or self._starter is None or not peer.has_ended:
            return
        if self.peers.get(peer.role) is peer:
            self._stale += peer.num_stale_replies
            self.restarts[peer.role] += peer.stage != "parked"
            try:
                self._begin(self._starter, peer.role)
            except DaemonError as error:
                if self.peers[peer.role] is not peer:
                    self.lose(self.peers[peer.role], error, kill=False)
                    return
                peer.stage, peer.error = "failed", error  # there is no next life yet
                self._note_failure(peer, error, None)

    def on_readable(self, fd: int) -> None:
        """A descriptor of a process is ready; one that was closed meanwhile is not ours."""
        peer = self.children.find(fd)
        if peer is not None:
            events = peer.on_readable(fd)
            self.children.watch(peer)
            self._on_events(peer, events)

    def end(self, peer: Peer, *, kill: bool) -> tuple[Sent, ...]:
        """End its process and link; what will not be answered any more."""
        self._timers.cancel(peer.load_timer)
        sent = self.forget_sent(peer)
        peer.disconnect()
        self.children.end(peer, kill=kill)
        return sent

    def forget_sent(self, peer: Peer) -> tuple[Sent, ...]:
        """Wait for none of its answers; what it was asked."""
        sent = peer.forget_sent()
        for one in sent:
            one.cancel(self._timers)
        return sent

    def _begin(self, starter: Starter, role: Role) -> None:
        peer = starter.peer(role, self.peers.get(role))
        self.peers[role] = peer
        self.begin(peer)

    def begin(self, peer: Peer) -> None:
        """Start its process, and watch it."""
        events = peer.start(self._poller)
        self.children.watch(peer)
        self.children.await_deadline(peer)
        first = peer is self.understudy.candidate or self._plan.attach is not None
        seconds = self._plan.deadlines.load if first else self._loads.allow(peer.role)
        peer.began = time.monotonic()
        late = partial(self._on_load_late, peer, seconds)
        peer.load_timer = self._timers.add(peer.began + seconds, late)
        self._hears.tell(peer)
        self._on_events(peer, events)

    def _on_events(self, peer: Peer, events: Sequence[Event]) -> None:
        for event in events:
            if not peer.is_over:  # what it said before it was told to end means nothing any more
                self._hears.on_event(peer, event)
        self.restart_if_due(peer)

    def _on_load_late(self, peer: Peer, seconds: float) -> None:
        self._loads.note_late(peer.role)
        error = peer.process.absent(peer.role, seconds)
        self.lose(peer, error, kill=True)

    def _may_restart(self, peer: Peer) -> bool:
        """A target that cannot even load is an error at once, not a reason to wait."""
        served = peer.role in self._served or self.restarts["target"] > 0
        if isinstance(peer.error, PermissionRefused) and not served:
            return peer.role == "draft"
        return peer.role == "draft" or served or peer.process.may_come_later

    def _close_all(self) -> None:
        """Both end at the same time, within their deadlines."""
        everyone = (*self.everyone, *self.understudy.leaving)
        for peer in everyone:
            peer.end()
        for peer in everyone:
            peer.close()
