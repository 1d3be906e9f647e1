"""One daemon as the supervisor sees it: its process, its link, and what it has not answered."""

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from launch.deadlines_heap import DeadlineHeap, Timer
from launch.events import Role
from launch.process import Child, Event
from protocol.client import Link, Poller
from protocol.config import DRAFT_SOCKET, TARGET_SOCKET
from protocol.errors import DaemonError, InternalError
from protocol.messages import (
    Close,
    Closed,
    DaemonStatus,
    DraftHello,
    Failed,
    Hello,
    Ingest,
    Ingested,
    LinkMessage,
    Open,
    Opened,
    Pair,
    Paired,
    Prefill,
    Prefilled,
    Propose,
    Proposed,
    Replay,
    Replayed,
    Stage,
    TargetHello,
    Verified,
    Verify,
)
from protocol.state import DRAFT_REPLIES, TARGET_REPLIES, DraftReply, TargetReply

AnyReply = TargetReply | DraftReply
Listed = Open | Prefill | Replay | Ingest | Propose | Verify | Close
ListedReply = Opened | Prefilled | Replayed | Ingested | Proposed | Verified | Closed

SOCKETS: Final[dict[Role, str]] = {"target": TARGET_SOCKET, "draft": DRAFT_SOCKET}
REPLIES: Final[dict[Role, tuple[type[AnyReply], ...]]] = {
    "target": TARGET_REPLIES,
    "draft": DRAFT_REPLIES,
}
ANSWERED_BY: Final[dict[type[LinkMessage], tuple[type[LinkMessage], ...]]] = {
    Hello: (TargetHello, DraftHello),
    Pair: (Paired,),
    Open: (Opened,),
    Prefill: (Prefilled,),
    Replay: (Replayed,),
    Ingest: (Ingested,),
    Propose: (Proposed,),
    Verify: (Verified,),
    Close: (Closed,),
}


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """A message whose answer is due."""

    message: LinkMessage
    timer: Timer
    soft: Timer
    when: float  # on time.monotonic()'s clock

    def cancel(self, timers: DeadlineHeap) -> None:
        """No answer is waited for any more."""
        timers.cancel(self.timer)
        timers.cancel(self.soft)


class Peer:
    """Constructed without I/O; `start` spawns, `close` ends for certain."""

    def __init__(self, role: Role, life: int, child: Child) -> None:
        self.role: Role = role
        self.life = life
        self.child = child
        self.stage: Stage = "loading"
        self.error: DaemonError | None = None  # why it failed
        self.hello: TargetHello | DraftHello | None = None
        self.restart_at: float | None = None  # once it has failed
        self.has_served = False  # it was ready once
        self.num_stale_replies = 0
        self.fds: tuple[int, ...] = ()  # of the child, as the poller watches them
        # Not due until it is set.
        self.load_timer = Timer(0.0, None)
        self._started = False
        self._link: Link[AnyReply] | None = None
        self._sent: deque[Sent] = deque()

    def start(self, poller: Poller, run_dir: Path) -> None:
        """Spawn, and open the link that the daemon will answer on once it has loaded."""
        self.child.start()
        self._started = True
        self._link = poller.connect(f"ipc://{run_dir / SOCKETS[self.role]}", REPLIES[self.role])
        self.watch(poller)

    def terminate(self) -> None:
        """Ask the process to end; harmless if it has ended, or was never started."""
        if self._started:
            self.child.terminate()

    def close(self) -> None:
        """End the process and wait for it, within its deadlines; harmless if it has ended."""
        if self._started:
            self.child.close()

    def watch(self, poller: Poller) -> None:
        """Bring the poller up to date with the child's descriptors."""
        fds = self.child.fds
        for fd in self.fds:
            if fd not in fds:
                poller.remove(fd)
        for fd in fds:
            if fd not in self.fds:
                poller.add(fd)
        self.fds = fds

    def on_readable(self, fd: int) -> list[Event]:
        """What the child says, or how it ended."""
        return self.child.on_readable(fd)

    @property
    def link(self) -> Link[AnyReply]:
        if self._link is None:
            raise InternalError(f"the {self.role} daemon is not started")
        return self._link

    @property
    def is_idle(self) -> bool:
        """Whether no answer is due."""
        return not self._sent

    @property
    def latest_deadline(self) -> float:
        """When all that was sent must have been answered; 0 when nothing is due."""
        return max((sent.timer.when for sent in self._sent), default=0.0)

    def send(self, message: LinkMessage, timer: Timer, soft: Timer) -> None:
        """Send now; the timers are its hard and its soft deadline."""
        self.link.send(message)
        self._sent.append(Sent(message, timer, soft, time.monotonic()))

    def take(self, reply: AnyReply) -> Sent | None:
        """What `reply` answers; None, counted, when nothing that is due is answered by it.

        A daemon answers in the order of asking, but an answer may have been lost.
        """
        for sent in self._sent:
            if _answers(sent.message, reply):
                self._sent.remove(sent)
                return sent
        self.num_stale_replies += 1
        return None

    def forget_sent(self) -> tuple[Sent, ...]:
        """Everything that will not be answered any more."""
        sent, self._sent = tuple(self._sent), deque()
        return sent

    def status(self) -> DaemonStatus:
        running = self._started and self.child.exited is None
        return DaemonStatus(
            stage=self.stage,
            reason="" if self.error is None else str(self.error),
            life=self.life,
            pid=self.child.pid if running else None,
        )


def _answers(message: LinkMessage, reply: AnyReply) -> bool:
    if (reply.target_life, reply.draft_life) != (message.target_life, message.draft_life):
        return False
    if isinstance(reply, Failed):
        return True  # it names no sequence: the oldest
    if not isinstance(reply, ANSWERED_BY[type(message)]):
        return False
    if isinstance(message, Listed) and isinstance(reply, ListedReply):
        asked, answered = message.items, reply.results
        return len(asked) == len(answered) and all(
            one.sequence == other.sequence and one.round == other.round
            for one, other in zip(asked, answered, strict=True)
        )
    return True
