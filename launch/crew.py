"""The two daemons of one run: started in parallel, met, paired, watched, and ended for certain.

`Crew` turns what children and links say into three facts for its owner: a daemon is up, a daemon
is lost, a request was answered.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final

from launch.deadlines_heap import DeadlineHeap
from launch.events import Role
from launch.meeting import check_hello, check_pair, pair_message
from launch.owner import Owner
from launch.peer import AnyReply, Listed, ListedReply, Peer
from launch.plan import DaemonStatus, Loading, Plan, Stage
from launch.prepare import prepare
from launch.process import Child, Event, Exited, daemon_command
from protocol import status
from protocol.client import Poller
from protocol.config import FrozenConfig, write_config
from protocol.errors import DaemonDied, DaemonError, DeadlineExceeded, ProtocolError, from_wire
from protocol.messages import (
    WIRE_VERSION,
    DraftHello,
    Failed,
    Hello,
    LinkMessage,
    Pair,
    Paired,
    TargetHello,
)
from protocol.placement import Placement, choose

MODULES: Final[dict[Role, str]] = {"target": "target_daemon", "draft": "draft_daemon"}
LIVES: Final[dict[Role, int]] = {"target": 1, "draft": 2}  # no two starts share one
NO_DRAFT: Final = "no draft was asked for"
_MAX_NONCE: Final = (1 << 63) - 1


def installed(role: Role, config: Path) -> tuple[str, ...]:
    """The command line of our own daemon."""
    return daemon_command(MODULES[role], config)


class Crew:
    """Constructing starts nothing; `start` spawns, and `stack` ends what was spawned."""

    def __init__(
        self,
        plan: Plan,
        poller: Poller,
        timers: DeadlineHeap,
        owner: Owner,
        command: Callable[[Role, Path], Sequence[str]],
    ) -> None:
        self._plan = plan
        self._command = command
        self._poller = poller
        self._timers = timers
        self._owner = owner
        self._peers: dict[Role, Peer] = {}
        self._by_fd: dict[int, Peer] = {}
        self._run_dir = Path()
        self.placement: Placement | None = None
        self.no_draft = NO_DRAFT if plan.draft is None else "the draft is still loading"

    def start(self, run_dir: Path, stack: ExitStack) -> None:
        """Read both configs, then spawn both daemons; raises what `prepare` raises."""
        self._run_dir = run_dir
        prepared = prepare(self._plan, run_dir, LIVES)
        configs: dict[Role, FrozenConfig] = {"target": prepared.target}
        if prepared.draft is not None:
            configs["draft"] = prepared.draft
        for role, config in configs.items():
            path = run_dir / f"{role}.json"
            write_config(config, path)
            child = Child(self._command(role, path), deadlines=self._plan.deadlines)
            peer = Peer(role, LIVES[role], child)
            self._peers[role] = peer
            stack.callback(peer.close)
            peer.start(self._poller, run_dir)
            self._watch(peer)
            late = partial(self._on_load_late, peer)
            due = time.monotonic() + self._plan.deadlines.load
            peer.load_timer = self._timers.add(due, late)
            self._tell(peer)
        stack.callback(self._terminate_all)

    # --- what the owner asks -----------------------------------------------------------------

    @property
    def lives(self) -> tuple[int, int]:
        """Of target and draft; 0 where there is none."""
        draft = self._peers.get("draft")
        return (self._peers["target"].life, 0 if draft is None else draft.life)

    def stage(self, role: Role) -> Stage:
        peer = self._peers.get(role)
        return "absent" if peer is None else peer.stage

    def error(self, role: Role) -> DaemonError | None:
        """Why a daemon failed."""
        peer = self._peers.get(role)
        return None if peer is None else peer.error

    @property
    def target_hello(self) -> TargetHello | None:
        peer = self._peers.get("target")
        return peer.hello if peer is not None and isinstance(peer.hello, TargetHello) else None

    @property
    def draft_hello(self) -> DraftHello | None:
        peer = self._peers.get("draft")
        return peer.hello if peer is not None and isinstance(peer.hello, DraftHello) else None

    @property
    def num_stale_replies(self) -> int:
        return sum(peer.num_stale_replies for peer in self._peers.values())

    def status(self, role: Role) -> DaemonStatus:
        peer = self._peers.get(role)
        if peer is None:
            return DaemonStatus(stage="absent", reason="", life=0, pid=None)
        return peer.status()

    def send(self, role: Role, message: LinkMessage, seconds: float) -> None:
        """Send; the deadline counts from when everything sent before it must be answered."""
        peer = self._peers[role]
        began = max(time.monotonic(), peer.latest_deadline)
        timer = self._timers.add(began + seconds, partial(self._on_late, peer, message, seconds))
        try:
            peer.send(message, timer)
        except DaemonError as error:
            # Not now: the session that sends is in the middle of its commands.
            self._timers.cancel(timer)
            lose = partial(self._lose, peer, error, kill=True)
            self._timers.add(time.monotonic(), lose)

    # --- what the loop reports ---------------------------------------------------------------

    def on_readable(self, fd: int) -> None:
        """A descriptor of a child is ready; one that was closed meanwhile is not ours any more."""
        peer = self._by_fd.get(fd)
        if peer is None:
            return
        events = peer.on_readable(fd)
        self._watch(peer)
        for event in events:
            self._on_child(peer, event)

    def on_replies(self, link: object) -> None:
        """A link has something to read."""
        for peer in self._peers.values():
            if peer.stage == "failed" or peer.link is not link:
                continue
            for reply in peer.link.receive():
                if peer.error is not None:
                    return
                if isinstance(reply, ProtocolError):
                    self._lose(peer, ProtocolError(f"the {peer.role}: {reply}"), kill=True)
                else:
                    self._on_reply(peer, reply)

    def _on_child(self, peer: Peer, event: Event) -> None:
        match event:
            case status.Loading(done=done, total=total):
                self._tell(peer, done, total)
            case status.Ready():
                self._timers.cancel(peer.load_timer)
                peer.stage = "greeting"
                self._tell(peer)
                target, draft = self.lives
                hello = Hello(
                    target_life=target,
                    draft_life=draft,
                    wire_version=WIRE_VERSION,
                    nonce=secrets.randbelow(_MAX_NONCE),
                )
                self.send(peer.role, hello, self._plan.deadlines.hello)
            case status.LoadFailed(code=code, detail=detail):
                self._lose(peer, from_wire(code, detail), kill=False)
            case Exited():
                self._lose(peer, DaemonDied(f"the {peer.role} daemon {event}"), kill=False)

    def _on_reply(self, peer: Peer, reply: AnyReply) -> None:
        sent = peer.take(reply)
        if sent is None:
            return
        self._timers.cancel(sent.timer)
        asked = sent.message
        if isinstance(asked, Listed) and isinstance(reply, Failed | ListedReply):
            self._owner.on_answer(peer.role, asked, reply)
            return
        try:
            self._meet(peer, asked, reply)
        except DaemonError as error:
            self._lose(peer, error, kill=True)

    def _meet(self, peer: Peer, asked: LinkMessage, reply: AnyReply) -> None:
        match asked, reply:
            case _, Failed():
                raise from_wire(reply.code, reply.detail)
            case Hello(), TargetHello() | DraftHello():
                check_hello(asked, reply, peer.role)
                peer.hello = reply
                if peer.role == "target":
                    self._up(peer)
            case Pair(), Paired():
                self._up(peer)
            case _:
                raise ProtocolError(f"the {peer.role} answered {type(reply).__name__}")
        self._pair()

    def _pair(self) -> None:
        """Pair as soon as both have said what they are."""
        target, draft = self.target_hello, self.draft_hello
        peer = self._peers.get("draft")
        if target is None or draft is None or peer is None or peer.stage != "greeting":
            return
        try:
            check_pair(target, draft)
            self.placement = choose(self._plan.transport, target.host, draft.host)
        except DaemonError as error:
            self._lose(peer, error, kill=True)
            return
        peer.stage = "pairing"
        self._tell(peer)
        message = pair_message(target, draft, self.placement, self._run_dir)
        self.send("draft", message, self._plan.deadlines.pair)

    def _up(self, peer: Peer) -> None:
        peer.stage = "ready"
        self._tell(peer)
        self._owner.on_up(peer.role)

    # --- losses ------------------------------------------------------------------------------

    def _on_load_late(self, peer: Peer) -> None:
        seconds = self._plan.deadlines.load
        error = DeadlineExceeded(f"the {peer.role} did not load within {seconds:g} s")
        self._lose(peer, error, kill=True)

    def _on_late(self, peer: Peer, message: LinkMessage, seconds: float) -> None:
        verb = type(message).__name__
        if isinstance(message, Listed):
            self._owner.on_late(peer.role, message)
        error = DeadlineExceeded(f"the {peer.role} did not answer {verb} within {seconds:g} s")
        self._lose(peer, error, kill=True)

    def _lose(self, peer: Peer, error: DaemonError, *, kill: bool) -> None:
        """Give up on a daemon: for good, in this life. A second reason changes nothing."""
        if peer.stage == "failed":
            return
        peer.stage, peer.error = "failed", error
        self._timers.cancel(peer.load_timer)
        for sent in peer.forget_sent():
            self._timers.cancel(sent.timer)
        peer.link.close()
        if kill:
            peer.child.kill()
        else:
            peer.child.terminate()
        self._await_end(peer)
        self._tell(peer)
        if peer.role == "draft":
            self.no_draft = str(error)
        self._owner.on_lost(peer.role, error)

    def _await_end(self, peer: Peer) -> None:
        if peer.child.deadline is not None:
            self._timers.add(peer.child.deadline, partial(self._on_child_deadline, peer))

    def _on_child_deadline(self, peer: Peer) -> None:
        peer.child.on_deadline()
        self._watch(peer)
        self._await_end(peer)

    def _terminate_all(self) -> None:
        """Both end at the same time; `Peer.close` then waits for each."""
        for peer in self._peers.values():
            peer.child.terminate()

    def _watch(self, peer: Peer) -> None:
        before = peer.fds
        peer.watch(self._poller)
        for fd in before:
            self._by_fd.pop(fd, None)
        for fd in peer.fds:
            self._by_fd[fd] = peer

    def _tell(self, peer: Peer, done: int = 0, total: int = 0) -> None:
        detail = "" if peer.error is None else str(peer.error)
        self._owner.on_loading(
            Loading(role=peer.role, stage=peer.stage, done=done, total=total, detail=detail)
        )
