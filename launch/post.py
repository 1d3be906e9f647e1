"""Sends to daemons, and minds by when each message must have been answered.

A message goes out at once. Its deadlines are set before the loop waits, when nothing waits for the
loop any more: learning how long an answer may take is no part of a round.
"""

import time
from collections import deque
from collections.abc import Callable
from functools import partial

from launch.deadlines_heap import DeadlineHeap
from launch.events import Role
from launch.patience import Allowance
from launch.peer import Listed, Peer, Sent
from protocol.errors import DaemonError, DeadlineExceeded
from protocol.messages import LinkMessage


class Post:
    """`on_soft` is told once of an answer that is late, `on_late` of one that never came.

    `lose` is told of a daemon that takes no message.
    """

    def __init__(
        self,
        timers: DeadlineHeap,
        on_soft: Callable[[Role, Listed], None],
        on_late: Callable[[Peer, LinkMessage, DaemonError], None],
        lose: Callable[[Peer, DaemonError], None],
    ) -> None:
        self._timers = timers
        self._on_soft = on_soft
        self._on_late = on_late
        self._lose = lose
        self._unsettled: deque[tuple[Peer, Sent, Listed, Callable[[], Allowance]]] = deque()

    def send(self, peer: Peer, message: LinkMessage, seconds: float) -> None:
        """Send; it counts from when everything sent before must be answered."""
        self.settle()
        if (sent := self._send(peer, message)) is not None:
            self._await(peer, sent, seconds)

    def ask(self, peer: Peer, message: Listed, allow: Callable[[], Allowance]) -> None:
        """Send; `settle` asks how long it may take. The soft deadline counts from now."""
        sent = self._send(peer, message)
        if sent is not None:
            self._unsettled.append((peer, sent, message, allow))

    def settle(self) -> None:
        """Before the loop waits: set the deadlines of what was asked, in that order."""
        while self._unsettled:
            peer, sent, message, allow = self._unsettled.popleft()
            if not peer.awaits(sent):  # it is gone meanwhile
                continue
            allowed = allow()
            self._await(peer, sent, allowed.hard)
            if allowed.soft is not None:
                late = partial(self._on_soft, peer.role, message)
                sent.soft = self._timers.add(sent.when + allowed.soft, late)

    def _await(self, peer: Peer, sent: Sent, seconds: float) -> None:
        due = max(sent.when, peer.latest_deadline) + seconds
        sent.timer = self._timers.add(due, partial(self._expire, peer, sent.message, seconds))

    def _expire(self, peer: Peer, message: LinkMessage, seconds: float) -> None:
        verb = type(message).__name__
        reason = f"the {peer.role} did not answer {verb} within {seconds:g} s"
        self._on_late(peer, message, DeadlineExceeded(reason))

    def _send(self, peer: Peer, message: LinkMessage) -> Sent | None:
        try:
            return peer.send(message)
        except DaemonError as error:
            # Not now: the session that sends is in the middle of its commands.
            self._timers.add(time.monotonic(), partial(self._lose, peer, error))
            return None
