"""The life of each daemon: started with a number of its own, ended, and started again in time.

A lost daemon is started again with a new life, after a back-off that grows from failure to failure.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TypeAlias

from launch.children import Children
from launch.deadlines_heap import DeadlineHeap
from launch.events import Role
from launch.peer import Listed, Peer
from launch.plan import Plan
from launch.restart import Backoff
from launch.starter import Starter
from protocol.client import Poller
from protocol.errors import DaemonError, DeadlineExceeded

OnOver: TypeAlias = Callable[[Peer, DaemonError, Listed | None], None]


class Lives:
    """Constructing starts nothing; `start` spawns, and `stack` ends what was spawned.

    `tell` hears of every stage of a peer. `on_over` hears that a life has ended by itself or was
    ended for a reason: nothing that was asked of it will be answered, and what it was at.
    """

    def __init__(
        self,
        plan: Plan,
        poller: Poller,
        timers: DeadlineHeap,
        *,
        command: Callable[[Role, Path], Sequence[str]],
        tell: Callable[[Peer], None],
        on_over: OnOver,
    ) -> None:
        self._plan = plan
        self._poller = poller
        self._timers = timers
        self._command = command
        self._tell = tell
        self._on_over = on_over
        self._run_dir = Path()
        self._starter: Starter | None = None
        self._stale = 0  # replies of lives that are over
        self._backoffs: dict[Role, Backoff] = {
            role: Backoff(plan.restarts) for role in ("target", "draft")
        }
        self.peers: dict[Role, Peer] = {}  # of the present lives
        self.children = Children(poller, timers, self.restart_if_due)
        self.restarts: dict[Role, int] = {"target": 0, "draft": 0}

    def start(self, run_dir: Path, stack: ExitStack) -> None:
        """Read both configs, then spawn both daemons; raises what `prepare` raises."""
        self._run_dir = run_dir
        self._starter = Starter(self._plan, run_dir, self._command)
        stack.callback(self._close_all)
        for role in self._starter.roles:
            self._spawn(self._starter, role)

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
        self._backoffs[peer.role].up(time.monotonic())

    def note_loaded(self, peer: Peer) -> None:
        """It has loaded, in time."""
        self._timers.cancel(peer.load_timer)

    def lose(self, peer: Peer, error: DaemonError, *, kill: bool) -> None:
        """Its life is over. A second reason changes nothing."""
        if peer.stage == "failed":
            return
        peer.stage, peer.error = "failed", error
        self._timers.cancel(peer.load_timer)
        sent = peer.forget_sent()
        for one in sent:
            one.cancel(self._timers)
        peer.link.close()
        self.children.end(peer, kill=kill)
        now = time.monotonic()
        delay = self._backoffs[peer.role].failed(now, error)
        self._tell(peer)
        if self._may_restart(peer):
            peer.restart_at = now + delay
            self._timers.add(peer.restart_at, partial(self.restart_if_due, peer))
        asked = next((one.message for one in sent if isinstance(one.message, Listed)), None)
        self._on_over(peer, error, asked)

    def restart_if_due(self, peer: Peer) -> None:
        """Not before its process has ended: it may still hold, or remove, the socket's name."""
        late = peer.restart_at is not None and time.monotonic() >= peer.restart_at
        if not late or self._starter is None or peer.child.exited is None:
            return
        if self.peers.get(peer.role) is peer:
            self._stale += peer.num_stale_replies
            self.restarts[peer.role] += 1
            self._spawn(self._starter, peer.role)

    def _spawn(self, starter: Starter, role: Role) -> None:
        peer = starter.peer(role)
        self.peers[role] = peer
        peer.start(self._poller, self._run_dir)
        self.children.watch(peer)
        due = time.monotonic() + self._plan.deadlines.load
        peer.load_timer = self._timers.add(due, partial(self._on_load_late, peer))
        self._tell(peer)

    def _on_load_late(self, peer: Peer) -> None:
        seconds = self._plan.deadlines.load
        error = DeadlineExceeded(f"the {peer.role} did not load within {seconds:g} s")
        self.lose(peer, error, kill=True)

    def _may_restart(self, peer: Peer) -> bool:
        """A target that cannot even load is an error at once, not a reason to wait."""
        return peer.role == "draft" or peer.has_served or self.restarts["target"] > 0

    def _close_all(self) -> None:
        """Both end at the same time, within their deadlines."""
        for peer in self.peers.values():
            peer.terminate()
        for peer in self.peers.values():
            peer.close()
