"""One daemon as the supervisor sees it: its process, its link, and what it has not answered."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from launch.daemon_process import DaemonProcess, Event
from launch.deadlines_heap import DeadlineHeap, Timer
from launch.events import Role
from protocol.client import Link, Poller
from protocol.config import DRAFT_SOCKET, TARGET_SOCKET
from protocol.errors import DaemonError, InternalError
from protocol.keyring import Keyring
from protocol.messages import (
    Close,
    Closed,
    DaemonStatus,
    DraftHello,
    Failed,
    Hello,
    Ingest,
    Ingested,
    ItemFailed,
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
Answer = ListedReply | Failed  # to what is listed

OVER: Final = ("failed", "parked")  # stages in which nothing can be asked
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


@dataclass(slots=True, eq=False)
class Sent:
    """A message whose answer is due; `timer` and `soft` are set before the loop waits."""

    message: LinkMessage
    when: float  # on time.monotonic()'s clock
    timer: Timer = field(default_factory=partial(Timer, 0.0, None))
    soft: Timer = field(default_factory=partial(Timer, 0.0, None))

    def cancel(self, timers: DeadlineHeap) -> None:
        """No answer is waited for any more."""
        timers.cancel(self.timer)
        timers.cancel(self.soft)


class Peer:
    """Constructed without I/O; `start` brings the daemon about, `close` lets go of it.

    `address` is where the daemon answers, behind its key of `keyring` if that is on a network.
    """

    def __init__(
        self,
        role: Role,
        life: int,
        process: DaemonProcess,
        address: str,
        keyring: Keyring | None = None,
    ) -> None:
        self.role: Role = role
        self.life = life
        self.process = process
        self.stage: Stage = "loading"
        self.error: DaemonError | None = None  # why it failed
        self.hello: TargetHello | DraftHello | None = None
        self.restart_at: float | None = None  # once it has failed
        self.num_stale_replies = 0
        self.fds: tuple[int, ...] = ()  # of the process, as the poller watches them
        self.began = 0.0  # to load, on time.monotonic()'s clock
        # Not due until it is set.
        self.load_timer = Timer(0.0, None)
        self._address = address
        self._keyring = keyring
        self._started = False
        self._link: Link[AnyReply] | None = None
        self._sent: deque[Sent] = deque()

    def start(self, poller: Poller) -> Sequence[Event]:
        """Start, and open the link that the daemon will answer on once it has loaded."""
        events = self.process.start()
        self._started = True
        self._link = poller.connect(
            self._address, REPLIES[self.role], role=self.role, keyring=self._keyring
        )
        for message in self.process.opening:
            self._link.send(message)
        self.watch(poller)
        return events

    def end(self, *, kill: bool = False) -> None:
        """Its life is over: ask the process to end, by force for `kill`. Twice is harmless."""
        if self._started and kill:
            self.process.kill()
        elif self._started:
            self.process.terminate()

    def close(self) -> None:
        """Wait for that, within its deadlines; harmless if it has ended."""
        if self._started:
            self.process.close()

    def disconnect(self) -> None:
        """Close the link, if there is one."""
        if self._link is not None:
            self._link.close()

    @property
    def has_ended(self) -> bool:
        """Whether another life may begin."""
        return not self._started or self.process.has_ended

    def watch(self, poller: Poller) -> None:
        """Bring the poller up to date with the process's descriptors."""
        fds = self.process.fds
        for fd in self.fds:
            if fd not in fds:
                poller.remove(fd)
        for fd in fds:
            if fd not in self.fds:
                poller.add(fd)
        self.fds = fds

    def on_readable(self, fd: int) -> Sequence[Event]:
        """What the process says, or how it ended."""
        return self.process.on_readable(fd)

    @property
    def is_over(self) -> bool:
        """Whether nothing can be asked of it any more."""
        return self.stage in OVER

    def answers_over(self, link: object) -> bool:
        """Whether this is its link, and it can be asked over it."""
        return self._link is link and self.stage not in OVER

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

    def send(self, message: LinkMessage) -> Sent:
        """Send now; the caller says by when it must be answered."""
        link, when = self._link or self.link, time.monotonic()
        link.send(message)
        sent = Sent(message, when)
        self._sent.append(sent)
        return sent

    def awaits(self, sent: Sent) -> bool:
        """Whether its answer may still come."""
        return sent in self._sent

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

    @property
    def reason(self) -> str:
        """Why it does not serve: it failed, or it is a service that is not there yet."""
        if self.error is not None:
            return str(self.error)
        is_awaited = self.process.may_come_later and not self.process.pid
        if self.stage == "loading" and is_awaited:
            return f"waiting for a {self.role} daemon at {self._address}"
        return ""

    def status(self) -> DaemonStatus:
        return DaemonStatus(
            stage=self.stage,
            reason=self.reason,
            life=self.life,
            pid=None if self.has_ended else self.process.pid or None,
        )


def _answers(message: LinkMessage, reply: AnyReply) -> bool:
    if reply.target_life != message.target_life or reply.draft_life != message.draft_life:
        return False
    if isinstance(reply, Failed):
        return True  # it names no sequence: the oldest
    if not isinstance(reply, ANSWERED_BY[type(message)]):
        return False
    if isinstance(message, Listed) and isinstance(reply, ListedReply):
        asked, answered = message.items, reply.results
        if len(asked) != len(answered):
            return False
        for one, other in zip(asked, answered, strict=True):
            if one.sequence != other.sequence or one.round != other.round:
                return False
    return True


def refusals(asked: Listed, answer: Failed) -> tuple[ItemFailed, ...]:
    """A refused message is refused for each of its sequences."""
    return tuple(
        ItemFailed(sequence=item.sequence, round=item.round, code=answer.code, detail=answer.detail)
        for item in asked.items
    )
