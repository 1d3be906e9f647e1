"""Signs of life from a daemon that has nothing to do.

What is being worked on has deadlines of its own, which tell a loop that hangs from one that works.
This tells one that hangs from one that waits: the same Hello again, answered by the daemon's own
loop and not by a thread of the link. (The link's heartbeats tell only that a connection is up.)
"""

import time
from collections.abc import Callable
from functools import partial

from launch.deadlines_heap import DeadlineHeap
from launch.peer import Peer
from protocol.config import Deadlines
from protocol.messages import Hello, LinkMessage


class Heartbeats:
    """`hello` makes the message with a nonce; `send` takes it with its deadline."""

    def __init__(
        self,
        timers: DeadlineHeap,
        deadlines: Deadlines,
        hello: Callable[[Peer, int], Hello],
        send: Callable[[Peer, LinkMessage, float], None],
    ) -> None:
        self._timers = timers
        self._deadlines = deadlines
        self._hello = hello
        self._send = send
        self._beating: set[int] = set()  # lives

    def start(self, peer: Peer) -> None:
        """Once for each life that serves; it ends with the life."""
        if peer.life not in self._beating:
            self._beating.add(peer.life)
            self._await(peer)

    def _await(self, peer: Peer) -> None:
        due = time.monotonic() + self._deadlines.heartbeat
        self._timers.add(due, partial(self._beat, peer))

    def _beat(self, peer: Peer) -> None:
        if peer.is_over or peer.hello is None:
            self._beating.discard(peer.life)
            return
        if peer.is_idle:
            message = self._hello(peer, peer.hello.nonce)
            self._send(peer, message, self._deadlines.heartbeat_answer)
        self._await(peer)
