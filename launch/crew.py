"""The two daemons of one run: started in parallel, watched, started again, and ended for certain.

`Crew` turns what children and links say into three facts for its owner: a daemon is up, a daemon
is lost, a request was answered. `launch.lives` starts them, and starts a lost one again.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

from launch.casting import Casting
from launch.daemon_process import Event, Lost, Present
from launch.deadlines_heap import DeadlineHeap
from launch.events import Accuse, Role
from launch.heartbeat import Heartbeats
from launch.introductions import TIED, Introductions
from launch.lives import Listeners, Lives
from launch.owner import Owner
from launch.patience import Allowance
from launch.peer import Answer, AnyReply, Listed, Peer
from launch.plan import Loading, Plan
from launch.post import Post
from launch.process import Exited
from protocol import status
from protocol.client import Poller
from protocol.errors import (
    DaemonDied,
    DaemonError,
    ProtocolError,
    Unavailable,
    from_wire,
)
from protocol.messages import DaemonStatus, DraftHello, LinkMessage, Stage, TargetHello
from protocol.placement import Placement

ABSENT: Final = DaemonStatus(stage="absent", reason="", life=0, pid=None)
Step: TypeAlias = status.Loading
NO_STEP: Final = Step(done=0, total=0)
NO_DRAFT: Final = "no draft was asked for"
LOADING: Final = "the draft is still loading"
DRAFT_PARKED: Final = "the draft is parked"
UNPAIRED: Final = "the draft waits for the target to be started again"


class Crew:
    """Constructing starts nothing; `start` does, and `stack` ends what was started."""

    def __init__(
        self,
        plan: Plan,
        poller: Poller,
        timers: DeadlineHeap,
        owner: Owner,
        command: Callable[[Role, Path], Sequence[str]],
    ) -> None:
        self._plan = plan
        self._timers = timers
        self._owner = owner
        listeners = Listeners(
            tell=self._tell,
            on_event=self._on_event,
            on_over=self._on_over,
            on_parked=owner.on_parked,
            on_candidate=owner.on_candidate,
        )
        self._lives = Lives(plan, poller, timers, command, listeners)
        lose = partial(self._lives.lose, kill=True)
        self._post = Post(timers, owner.on_soft, self._on_late, lose)
        self._introductions = Introductions(
            plan,
            self._lives,
            send=self._post.send,
            on_up=self._up,
            on_stage=self._tell,
            on_bad_draft=lose,
        )
        hello = self._introductions.hello
        self._heartbeats = Heartbeats(timers, plan.deadlines, hello, self._post.send)
        self.casting = Casting(self._lives, self._introductions)
        self.no_draft = NO_DRAFT if plan.asks_no_draft else LOADING

    def start(self, run_dir: Path, stack: ExitStack) -> None:
        """Start both daemons, or attach to them; raises what `launch.starter` raises."""
        self._lives.start(run_dir, stack)

    # --- what the owner asks -----------------------------------------------------------------

    @property
    def lives(self) -> tuple[int, int]:
        """Of target and draft; 0 where there is none."""
        return self._introductions.lives

    def stage(self, role: Role) -> Stage:
        peer = self._lives.peers.get(role)
        return "absent" if peer is None else peer.stage

    def log(self, role: Role) -> str:
        """The end of what a daemon wrote, where it was spawned here."""
        peer = self._lives.peers.get(role)
        return "" if peer is None else peer.process.log

    def error(self, role: Role) -> DaemonError | None:
        """Why a daemon failed."""
        peer = self._lives.peers.get(role)
        return None if peer is None else peer.error

    def is_given_up(self, role: Role) -> bool:
        """Whether it failed before it ever served, or so often that it is tried rarely."""
        return self._lives.is_given_up(role)

    def has_failed(self, role: Role) -> bool:
        """Whether its last start came to nothing, or its last life ended."""
        return self._lives.has_failed(role)

    @property
    def spawns(self) -> bool:
        """Whether the daemons are children, to be started and ended here."""
        return self._plan.attach is None

    def park(self, role: Role) -> None:
        """End a daemon's process; the draft goes with its target, whose memory it maps."""
        if role == "target":
            self.park("draft")
            self._introductions.part()
        if role in self._lives.peers:
            self._lives.park(role)
        if role == "draft" and role in self._lives.peers:
            self.no_draft = DRAFT_PARKED

    def unpark(self, role: Role) -> None:
        """Start it again."""
        if role == "draft" and role in self._lives.peers:
            self.no_draft = LOADING
        self._lives.unpark(role)

    def is_gone(self, role: Role) -> bool:
        """Whether it has no process, and will get none before it is unparked."""
        return self._lives.is_gone(role)

    @property
    def restarts(self) -> dict[Role, int]:
        """How often each was started again."""
        return self._lives.restarts

    @property
    def placement(self) -> Placement | None:
        return self._introductions.placement

    @property
    def doubt(self) -> str:
        """Why the draft may be no draft for this target."""
        return self._introductions.doubt

    @property
    def paired_seconds(self) -> float:
        return self._introductions.paired_seconds

    @property
    def target_hello(self) -> TargetHello | None:
        return self._introductions.target_hello

    @property
    def draft_hello(self) -> DraftHello | None:
        return self._introductions.draft_hello

    @property
    def num_stale_replies(self) -> int:
        return self._lives.num_stale_replies

    def status(self, role: Role) -> DaemonStatus:
        peer = self._lives.peers.get(role)
        return ABSENT if peer is None else peer.status()

    def send(self, role: Role, message: Listed, allow: Callable[[], Allowance]) -> None:
        """Send at once; `settle` asks how long it may take."""
        self._post.ask(self._lives.peers[role], message, allow)

    def settle(self) -> None:
        """Before the loop waits: set the deadlines of what was sent."""
        self._post.settle()

    # --- what the loop reports ---------------------------------------------------------------

    def on_readable(self, fd: int) -> None:
        """A descriptor of a child is ready; one that was closed meanwhile is not ours any more."""
        self._lives.on_readable(fd)

    def on_replies(self, link: object) -> None:
        """A link has something to read."""
        peer = self._lives.linked(link)
        if peer is None:
            return
        for reply in peer.link.receive():
            if peer.error is not None:
                return
            if isinstance(reply, ProtocolError):
                self._lives.lose(peer, ProtocolError(f"the {peer.role}: {reply}"), kill=True)
            else:
                self._on_reply(peer, reply)
        if (broken := peer.link.broken) is not None:
            self._lives.lose(peer, broken, kill=False)

    def _on_event(self, peer: Peer, event: Event) -> None:
        match event:
            case Step():
                self._tell(peer, event)
            case status.Ready():
                self._lives.note_loaded(peer)
                self._introductions.greet(peer, self._plan.deadlines.hello)
            case Present():
                deadlines = self._plan.deadlines  # the load's is the first of the two
                self._introductions.greet(peer, deadlines.load + deadlines.hello)
            case status.LoadFailed(code=code, detail=detail):
                self._lives.lose(peer, from_wire(code, detail), kill=False)
            case Lost(error=error):
                self._lives.lose(peer, error, kill=False)
            case Exited():
                self._lives.lose(peer, DaemonDied(f"the {peer.role} daemon {event}"), kill=False)

    def _on_reply(self, peer: Peer, reply: AnyReply) -> None:
        sent = peer.take(reply)
        if sent is None:
            return
        asked = sent.message
        if isinstance(asked, Listed) and isinstance(reply, Answer):
            self._owner.on_answer(peer.role, asked, reply, time.monotonic() - sent.when)
            sent.cancel(self._timers)  # after what it leads to was asked
            return
        sent.cancel(self._timers)
        self._lives.note_loaded(peer)
        try:
            self._introductions.meet(peer, asked, reply)
        except DaemonError as error:
            self._lives.lose(peer, error, kill=True)
            return
        if peer is self._lives.candidate:
            self._owner.on_candidate(None)

    def _up(self, peer: Peer) -> None:
        self._lives.note_up(peer)
        if peer.role == "draft":
            self.no_draft = UNPAIRED  # all that can part them and has no reason of its own
        self._heartbeats.start(peer)
        self._tell(peer)
        self._owner.on_up(peer.role)

    # --- losses ------------------------------------------------------------------------------

    def _on_late(self, peer: Peer, message: LinkMessage, error: DaemonError) -> None:
        if isinstance(message, Listed):
            self._owner.on_late(peer.role, message)
        self._lives.lose(peer, error, kill=True)

    def accuse(self, accusation: Accuse) -> None:
        """Start a daemon again if it still lives this life; it is not to be trusted any more."""
        peer = self._lives.peers.get(accusation.role)
        if peer is not None and peer.life == accusation.life:
            kind = ProtocolError if accusation.sick else Unavailable
            lose = partial(self._lives.lose, peer, kind(accusation.reason), kill=True)
            self._timers.add(time.monotonic(), lose)  # the session that asks is at work

    def _on_over(self, peer: Peer, error: DaemonError, asked: Listed | None) -> None:
        if peer.role == "draft":
            self.no_draft = str(error)
            self._owner.on_lost(peer.role, error, asked)
            return
        tied = self._introductions.part()
        self._owner.on_lost(peer.role, error, asked)
        if tied is not None:
            self._lives.lose(tied, DaemonDied(TIED), kill=True)

    def _tell(self, peer: Peer, step: Step = NO_STEP) -> None:
        counts = {"done": step.done, "total": step.total}
        why = step.detail or peer.reason
        self._owner.on_loading(Loading(role=peer.role, stage=peer.stage, detail=why, **counts))
